// Products with EXL2 and GPTQ matrices on tensor cores, for 1 to 64 rows of x. Compiled by NVRTC, behind tensor_cores.cuh.
//
// The weights are the A operand of mma.sync.m16n8k16 (its 16 rows are outputs), x is B. The order of inputs inside a
// fragment is free as long as A and B agree, so the weights are read as the package lays them in memory: a lane takes
// 4 neighbouring outputs of a block of 32 inputs, `bits` words of 16 bytes. 4 lanes take 4 blocks, which make a tile of
// 128 inputs; 8 times 4 lanes, a warp, take 32 outputs; a block of 4 warps takes a strip of 128 outputs.
//
//   lane 4g + t, step s = 0..7 of a tile: outputs 4g .. 4g+3; inputs 4s .. 4s+3 of the tile's block t
//
// The tiles of a strip are divided among `parts` blocks. Each writes its sums; the last to finish adds all parts, in
// their order. So a row's result does not depend on other rows, nor on their number, nor on which block was the last.
//
// Every weight has the bits that the package's `reconstruct` gives it: rn16(rn16(step^2 * most) * (level - zero)) for
// EXL2, rn16(scale * (level - zero)) for GPTQ. Sums are fp32.

#define THREADS 128
#define STRIP 128
#define STAGES 3

// Blocks of 32 inputs that follow one another, with one width and groups of one size. Group of block b: group + (b >> shift)
struct Run { int bits, tile, tiles, word, block, blocks, group, shift; };
struct Matrix {
    const u32* words;   // [rows of words, n]
    const u32* steps;   // EXL2: q_scale [groups, n / 8]. GPTQ: qzeros, of the same shape
    const u16* scale;   // EXL2: q_scale_max [groups]. GPTQ: scales [groups, n]
    const u16* bias;    // [n], or null
    u16* out;           // [rows, pitch]; not used by `gated`
    int n, strips, runs, pitch;
    Run run[8];
    int part[33];       // the first tile of each part, and the number of tiles
    int pad;
};
struct Launch {
    Matrix matrix[3];
    const u16* x;       // placed, see below
    float* sums;        // [parts, rows, width]
    u32* counters;      // [strips], zero before and after
    u16* placed;        // `gated`: the result, in the order of the next product
    int matrices, rows, parts, width, kind, bits;
};

// Levels. A half of 0x6400 | v << SHIFT is 1024 + v * 2^SHIFT. So a level becomes a number by one exact addition, or by one
// exact fma that also undoes the shift.

template <u32 MASK> __device__ __forceinline__ u32 masked(u32 w) {
    u32 r; asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(r) : "r"(w), "n"(MASK), "r"(0x64006400)); return r;  // w & MASK | 0x64006400
}
template <int SHIFT, int ZERO> __device__ __forceinline__ u32 less_zero(u32 w) {
    return SHIFT ? fma2(w, power(-SHIFT), minus((1024 >> SHIFT) + ZERO)) : add2(w, minus(1024 + ZERO));
}
template <int BITS, int SHIFT> __device__ __forceinline__ u32 field(u32 w) {
    constexpr int RIGHT = SHIFT + BITS <= 10 ? 0 : SHIFT, LEFT = SHIFT - RIGHT;
    return less_zero<LEFT, 1 << (BITS - 1)>(masked<(((1u << BITS) - 1) << LEFT) * 0x10001u>(w >> RIGHT));
}
// Levels 2 * P and 2 * P + 1 of a block, less the zero point. w: the block's words of one output, as the package shuffles
// them when it loads (cuda/q_matrix.cu): both levels of a pair are in the same place of a word's halves
template <int BITS, int P> __device__ __forceinline__ u32 pair(const u32 (&w)[BITS]) {
    if constexpr (BITS == 8) return less_zero<0, 128>(__byte_perm(w[P / 2], 0x64646464, P % 2 ? 0x4342 : 0x4140));
    else if constexpr (BITS == 4) return field<4, 4 * (P % 4)>(w[P / 4]);
    else if constexpr (BITS == 2) return field<2, 2 * (P % 8)>(w[P / 8]);
    else if constexpr (BITS == 6) {
        constexpr int U = 3 * (P / 8), Q = P % 8;
        if constexpr (Q < 6) return field<6, 6 * (Q % 2)>(w[U + Q / 2]);
        else return less_zero<0, 32>((w[U + Q - 6] >> 12 & 0x000f000f) | (w[U + 2] >> (2 * Q - 4) & 0x00300030) | 0x64006400);
    } else {
        constexpr int EACH = BITS == 5 ? 3 : 5;  // pairs in a word; the last pair has a bit in each word
        if constexpr (P < 15) return field<BITS, BITS * (P % EACH)>(w[P / EACH]);
        else {
            u32 v = 0x64006400;
            #pragma unroll
            for (int i = 0; i < BITS; i++) v |= w[i] >> (15 - i) & (0x00010001 << i);
            return less_zero<0, 1 << (BITS - 1)>(v);
        }
    }
}

// What turns the levels of 4 outputs into weights: scales, and for GPTQ zero points
template <bool GPTQ> struct Scales {
    u32 s[4];       // twice the scale of each output
    u32 even[4], odd[4];  // GPTQ: -(1024 + zero) and -(64 + zero), twice
};
template <int BITS, bool GPTQ, int P> __device__ __forceinline__ u32 weight(const u32 (&w)[BITS], const Scales<GPTQ>& k, int c) {
    if constexpr (!GPTQ) return mul2(pair<BITS, P>(w), k.s[c]);
    else {
        const u32 v = w[P / 4] >> (P % 4 / 2 * 8);
        return mul2(P % 2 ? fma2(masked<0x00f000f0>(v), power(-4), k.odd[c]) : add2(masked<0x000f000f>(v), k.even[c]), k.s[c]);
    }
}
__device__ __forceinline__ uint4 shared16(u32 at) {
    uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)); return v;
}
template <int BITS, bool GPTQ, int MT, int S> __device__ __forceinline__ void step(float (&acc)[2][MT][4], const u32 (&w)[4][BITS], const Scales<GPTQ>& k, const uint4 (&x)[MT]) {
    u32 a[4], b[4];
    #pragma unroll
    for (int c = 0; c < 4; c++) { a[c] = weight<BITS, GPTQ, 2 * S>(w[c], k, c); b[c] = weight<BITS, GPTQ, 2 * S + 1>(w[c], k, c); }
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        const u32 low = S % 2 ? x[m].z : x[m].x, high = S % 2 ? x[m].w : x[m].y;
        mma(acc[0][m], a[0], a[1], b[0], b[1], low, high);
        mma(acc[1][m], a[2], a[3], b[2], b[3], low, high);
    }
}
template <int BITS, bool GPTQ, int MT, int J> __device__ __forceinline__ void two_steps(float (&acc)[2][MT][4], const u32 (&w)[4][BITS], const Scales<GPTQ>& k, u32 from) {
    uint4 x[MT];
    #pragma unroll
    for (int m = 0; m < MT; m++) x[m] = shared16(from + (J * MT + m) * 128);
    step<BITS, GPTQ, MT, 2 * J>(acc, w, k, x);
    step<BITS, GPTQ, MT, 2 * J + 1>(acc, w, k, x);
}

// Weights and x pass through rings of STAGES tiles in shared memory. Each lane reads the weights that it has copied itself;
// x is for all warps. Weights are copied by .ca: .cg took 1.5 times as long on an H200, for it fetches 32 bytes at a time.

__device__ __forceinline__ void copy_weights(u32 to, const void* from) { asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from)); }
__device__ __forceinline__ void copy_x(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from)); }
// Values that stay in registers: the compiler would read them from the kernel's arguments again and again
template <class T> __device__ __forceinline__ void keep(T*& p) { asm volatile("" : "+l"(p)); }
__device__ __forceinline__ void keep(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep(u32& v) { asm volatile("" : "+r"(v)); }

template <int MT> struct Walk {
    const Matrix& m;
    const u32* words; const u32* steps; const u16* scale; const uint4* x;  // from this lane's first output on; its first chunk of x
    int n, lane, active, slot_bytes;
    u32 ring, x_to, x_from;                    // places in shared memory
    int tile, end, slot;                       // what is computed next
    int ahead, slot_ahead, from, left;         // what is copied next; its run, and the tiles left in it
    const char* p; const uint4* px;

    __device__ __forceinline__ void enter() {
        const Run& run = m.run[from];
        const int i = ahead - run.tile;
        p = (const char*)(words + (size_t)(run.word + (4 * i + (lane & 3)) * run.bits) * n);
        px = x + (size_t)(run.block + 4 * i) * 256;
        left = run.tiles - i;
    }
    template <int BITS> __device__ __forceinline__ void copy(bool all) {
        const int row = n * 4;
        if (all) {
            const char* q = p;
            #pragma unroll
            for (int r = 0; r < BITS; r++, q += row) copy_weights(ring + slot_ahead * slot_bytes + r * (THREADS * 16), q);
        }
        p += 4 * BITS * row;
        #pragma unroll
        for (int k = 0; k < MT; k++) {  // chunk threadIdx.x + 128 k of [block 4][16 bytes 4][MT][row 8], its place within 8 xor 2 * block
            constexpr int PER = 16 / MT;
            copy_x((x_to ^ (k * PER / 4 * 32)) + (slot_ahead * MT + k) * (THREADS * 16), px + k * PER * 64);
        }
        px += 4 * 256;
        left--;
        slot_ahead = slot_ahead + 1 == STAGES ? 0 : slot_ahead + 1;
    }
    __device__ __forceinline__ void ask() {  // copy the next tile, of whatever width
        if (ahead < end) {
            if (!left) { from++; enter(); }
            const Run& run = m.run[from];
            const bool all = active && 4 * (ahead - run.tile) + (lane & 3) < run.blocks;
            switch (run.bits) {
                #define CASE(BITS) case BITS: copy<BITS>(all); break;
                WIDTHS
                #undef CASE
            }
        }
        ahead++;
        asm volatile("cp.async.commit_group;");
    }
    template <int BITS, bool GPTQ> __device__ __forceinline__ void go(float (&acc)[2][MT][4], const Run& run) {
        const int hi = min(end, run.tile + run.tiles);
        int group0 = run.group, shift = run.shift, blocks = run.blocks, eighth = n / 8;
        keep(group0); keep(shift); keep(blocks); keep(eighth);
        u32 word = 0; uint2 own = {0, 0};  // for EXL2 own.x is q_scale_max. Past the last block the scale is 0
        auto ask_scale = [&](int b) {
            word = 0; own = {0, 0};
            if (b < blocks) {
                const int group = group0 + (b >> shift);
                word = __ldg(steps + group * eighth);
                if (GPTQ) own = __ldg((const uint2*)(scale + (size_t)group * n)); else own.x = __ldg(scale + group);
            }
        };
        int b = 4 * (tile - run.tile) + (lane & 3);
        ask_scale(b);
        #pragma unroll 1
        for (; tile < hi; tile++, b += 4) {
            asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2));
            __syncthreads();  // all have this tile's x, and all have read the tile whose slot is written next
            if (ahead < hi) {
                copy<BITS>(active && 4 * (STAGES - 1) + b < blocks);
                ahead++;
                asm volatile("cp.async.commit_group;");
            } else ask();
            const u32 nibbles = word >> (lane >> 2 & 1) * 16;
            Scales<GPTQ> k;
            #pragma unroll
            for (int c = 0; c < 4; c += 2) {
                const u32 v0 = (nibbles >> 4 * c & 15) + 1, v1 = (nibbles >> (4 * c + 4) & 15) + 1;
                if (GPTQ) {
                    const u32 e = both(v0, v1) | 0xe400e400, o = add2(e, minus(960) ^ 0x80008000);  // 960 - (1024 + zero)
                    k.s[c] = lows(c ? own.y : own.x); k.s[c + 1] = highs(c ? own.y : own.x);
                    k.even[c] = lows(e); k.even[c + 1] = highs(e);
                    k.odd[c] = lows(o); k.odd[c + 1] = highs(o);
                } else {
                    const u32 squares = add2(both(v0 * v0, v1 * v1) | 0x64006400, minus(1024)), s = mul2(squares, lows(own.x));
                    k.s[c] = lows(s); k.s[c + 1] = highs(s);
                }
            }
            if (tile + 1 < hi) ask_scale(b + 4);
            u32 w[4][BITS];
            #pragma unroll
            for (int r = 0; r < BITS; r++) {
                const uint4 v = shared16(ring + slot * slot_bytes + r * (THREADS * 16));
                w[0][r] = v.x; w[1][r] = v.y; w[2][r] = v.z; w[3][r] = v.w;
            }
            const u32 at = x_from + slot * MT * (THREADS * 16);
            two_steps<BITS, GPTQ, MT, 0>(acc, w, k, at);
            two_steps<BITS, GPTQ, MT, 1>(acc, w, k, at);
            two_steps<BITS, GPTQ, MT, 2>(acc, w, k, at);
            two_steps<BITS, GPTQ, MT, 3>(acc, w, k, at);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
    }
};

enum End { STORE, ADD, GATED };
enum Kind { SILU = 0, GELU = 1, WIDE = 1 };  // of GATED: the activation. Of ADD: whether the sum is fp32

__device__ __forceinline__ void plus(float4& s, const float4 p) { s.x += p.x; s.y += p.y; s.z += p.z; s.w += p.w; }
__device__ __forceinline__ void plus_bias(float4& s, const u16* bias, int k) {
    if (bias) { s.x += wide(bias[k]); s.y += wide(bias[k + 1]); s.z += wide(bias[k + 2]); s.w += wide(bias[k + 3]); }
}
__device__ __forceinline__ float gate(float v, float up, int kind) {
    v = kind == SILU ? v / (1.f + __expf(-v)) : 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
    return fminf(fmaxf(v * up, -65504.f), 65504.f);  // as the package: an activation is never infinite
}

template <int MT, End END> __device__ __forceinline__ void product(const Launch& l) {
    extern __shared__ __align__(128) uint4 memory[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int strip = blockIdx.x, which = 0;
    while (which + 1 < l.matrices && strip >= l.matrix[which].strips) strip -= l.matrix[which++].strips;
    const Matrix& m = l.matrix[which];
    const int column = strip * STRIP + warp * 32 + 4 * g;
    float acc[2][MT][4] = {};
    {
        const u32 base = (u32)__cvta_generic_to_shared(memory);
        const int c = threadIdx.x, mt = (c >> 3) % MT, tj = (c >> 3) / MT;
        Walk<MT> w{m};
        w.active = column < m.n;
        w.n = m.n; w.lane = lane; w.slot_bytes = l.bits * (THREADS * 16);
        w.words = m.words + (w.active ? column : 0); w.steps = m.steps + (w.active ? column / 8 : 0);
        #ifdef GPTQ4
        w.scale = m.scale + (w.active ? column : 0);
        #else
        w.scale = m.scale;
        #endif
        w.x = (const uint4*)l.x + (tj * 8 + mt) * 8 + (c & 7);
        w.ring = base + c * 16;
        w.x_to = base + STAGES * w.slot_bytes + ((c & ~7) + (c & 7 ^ 2 * (tj >> 2))) * 16;
        w.x_from = base + STAGES * w.slot_bytes + (t * 32 * MT + (g ^ 2 * t)) * 16;
        keep(w.words); keep(w.steps); keep(w.scale); keep(w.x); keep(w.n); keep(w.lane); keep(w.active); keep(w.slot_bytes);
        keep(w.ring); keep(w.x_to); keep(w.x_from);
        w.tile = w.ahead = m.part[blockIdx.y]; w.end = m.part[blockIdx.y + 1];
        w.slot = w.slot_ahead = w.from = 0;
        while (w.ahead >= m.run[w.from].tile + m.run[w.from].tiles) w.from++;
        w.enter();
        #pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) w.ask();
        for (int r = 0; r < m.runs; r++) {
            const Run& run = m.run[r];
            if (w.tile >= run.tile + run.tiles || w.tile >= w.end) continue;
            switch (run.bits) {
                #ifdef GPTQ4
                case 4: w.template go<4, true>(acc, run); break;
                #else
                #define CASE(BITS) case BITS: w.template go<BITS, false>(acc, run); break;
                WIDTHS
                #undef CASE
                #endif
            }
        }
    }
    if (END == STORE && l.parts == 1) {
        #pragma unroll
        for (int mt = 0; mt < MT; mt++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = mt * 8 + 2 * t + e;
                if (row >= l.rows || column >= m.n) continue;
                float4 s = make_float4(acc[0][mt][e], acc[0][mt][2 + e], acc[1][mt][e], acc[1][mt][2 + e]);
                plus_bias(s, m.bias, column);
                *(uint2*)(m.out + (size_t)row * m.pitch + column) = make_uint2(halves(s.x, s.y), halves(s.z, s.w));
            }
        return;
    }
    #pragma unroll
    for (int mt = 0; mt < MT; mt++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = mt * 8 + 2 * t + e;
            if (row < l.rows) *(float4*)(l.sums + ((size_t)blockIdx.y * l.rows + row) * l.width + blockIdx.x * STRIP + warp * 32 + 4 * g) =
                make_float4(acc[0][mt][e], acc[0][mt][2 + e], acc[1][mt][e], acc[1][mt][2 + e]);
        }
    // All threads of the block have written (the barrier); one releases that with its count, and acquires what others wrote.
    __shared__ int last;
    const int counter = END == GATED ? strip : blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(l.counters + counter) : "memory");
        last = before == (END == GATED ? 2 : 1) * l.parts - 1;
    }
    __syncthreads();
    if (!last) return;
    const float* sums = l.sums + counter * STRIP;
    constexpr int AT_ONCE = MT == 1 ? 2 : 4;
    const size_t apart = (size_t)l.rows * l.width;
    for (int j0 = threadIdx.x; j0 < l.rows * (STRIP / 4); j0 += THREADS * AT_ONCE) {
        float4 a[AT_ONCE] = {}, b[AT_ONCE] = {};
        #pragma unroll 4
        for (int y = 0; y < l.parts; y++)
            #pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int j = j0 + u * THREADS;
                if (j >= l.rows * (STRIP / 4)) continue;
                const float* p = sums + y * apart + (size_t)(j / (STRIP / 4)) * l.width + j % (STRIP / 4) * 4;
                plus(a[u], __ldcg((const float4*)p));
                if (END == GATED) plus(b[u], __ldcg((const float4*)(p + m.strips * STRIP)));
            }
        #pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int j = j0 + u * THREADS, row = j / (STRIP / 4), k = strip * STRIP + j % (STRIP / 4) * 4;
            if (j >= l.rows * (STRIP / 4) || k >= m.n) continue;
            float4 s = a[u];
            if (END == GATED) {
                plus_bias(s, l.matrix[0].bias, k);
                plus_bias(b[u], l.matrix[1].bias, k);
                *(uint2*)(l.placed + ((size_t)(k >> 3) * 8 + (row >> 3)) * 64 + (row & 7) * 8 + (k & 7)) = make_uint2(
                    halves(gate(s.x, b[u].x, l.kind), gate(s.y, b[u].y, l.kind)), halves(gate(s.z, b[u].z, l.kind), gate(s.w, b[u].w, l.kind)));
                continue;
            }
            plus_bias(s, m.bias, k);
            const size_t to = (size_t)row * m.pitch + k;
            if (END == ADD && l.kind == WIDE) {
                plus(s, *(float4*)((float*)m.out + to));
                *(float4*)((float*)m.out + to) = s;
            } else {
                uint2* p = (uint2*)(m.out + to);
                if (END == ADD) plus(s, make_float4(wide(p->x), wide(p->x >> 16), wide(p->y), wide(p->y >> 16)));
                *p = make_uint2(halves(s.x, s.y), halves(s.z, s.w));
            }
        }
    }
    if (threadIdx.x == 0) l.counters[counter] = 0;
}
// The most registers that let as many blocks share a processor as were measured to be the best on an H200
#define KERNELS(MT, BLOCKS) \
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) store_##MT(const __grid_constant__ Launch l) { product<MT, STORE>(l); } \
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) add_##MT(const __grid_constant__ Launch l) { product<MT, ADD>(l); } \
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gated_##MT(const __grid_constant__ Launch l) { product<MT, GATED>(l); }
#ifdef WIDTHS
KERNELS(1, 5)
KERNELS(2, 5)
KERNELS(4, 3)
KERNELS(8, 2)
#else

// x as the products read it: placed[k / 8][row / 8][row % 8][k % 8], with input k in the order of the weights' rows, and
// room for 64 rows.

__device__ __forceinline__ void put(u16* placed, int row, int chunk, uint4 v) { *(uint4*)(placed + ((size_t)chunk * 8 + (row >> 3)) * 64 + (row & 7) * 8) = v; }
__device__ __forceinline__ uint4 gather(const u16* row, const u16* perm, int chunk) {
    if (!perm) return *(const uint4*)(row + chunk * 8);
    u16 h[8];
    #pragma unroll
    for (int e = 0; e < 8; e++) h[e] = row[perm[chunk * 8 + e]];
    return make_uint4(h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16);
}
extern "C" __global__ void place(const u16* x, const u16* perm, u16* placed, int k) {
    const int chunk = blockIdx.x * blockDim.x + threadIdx.x;
    if (chunk * 8 < k) put(placed, blockIdx.y, chunk, gather(x + (size_t)blockIdx.y * k, perm, chunk));
}
// rn16(x / sqrt(mean(x^2) + eps) * weight), placed. A block of 512 threads for each row; x is fp32 if `is_wide`, else fp16
extern "C" __global__ void __launch_bounds__(512) rms_norm(const void* x, const u16* weight, const u16* perm, u16* placed, int k, float eps, int is_wide) {
    extern __shared__ __align__(16) u16 normed[];
    __shared__ float sums[16];
    const int row = blockIdx.x;
    auto at = [&](int i) { return is_wide ? ((const float*)x)[(size_t)row * k + i] : wide(((const u16*)x)[(size_t)row * k + i]); };
    float sum = 0;
    for (int i = threadIdx.x; i < k; i += 512) sum += at(i) * at(i);
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 16; i++) sum += sums[i];
    const float f = rsqrtf(sum / k + eps);
    for (int i = threadIdx.x; i < k; i += 512) normed[i] = (u16)halves(fminf(fmaxf(at(i) * f * wide(weight[i]), -65504.f), 65504.f), 0.f);
    __syncthreads();
    for (int c = threadIdx.x; c < k / 8; c += 512) put(placed, row, c, gather(normed, perm, c));
}
#endif

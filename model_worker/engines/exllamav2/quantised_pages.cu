// Attention over the pages of ExLlamaV2's quantised caches, read where they lie, for few queries of each sequence; and what
// writes such pages. Compiled by NVRTC behind tensor_cores.cuh, with DIM (numbers of a head: 64, 128 or 256), and KB and VB
// (bits of a key's numbers and of a value's: 4 or 8).
//
// The package's layout (cuda/cache_q.cuh): in each 64 consecutive numbers of a head, the even and the odd ones are
// transformed by a Hadamard matrix of 32 points ("turned"), in fp16. 32 consecutive results share a scale, their largest
// absolute value over 2^(bits - 1), and become levels. The transform is its own inverse but for a factor of 1/32. So
// q @ k is (q turned / 32) @ (k turned), and sums of turned values are turned back once, at the end.
//
// A sequence's keys are divided into parts (paged/kernels.py, schedule). A block of 4 warps takes a part for one key head;
// each warp takes 16 keys at a time. All query heads that share the key head are rows of one tile of 16: row r is query
// r / group of head r % group. Warps, and parts, are summed in their order, so a row has the same bits whatever runs beside.

#define WARPS 4
#define THREADS (WARPS * 32)
#define PAGE 256
#define EACH (DIM / 4)      // numbers of a key that a lane takes
#define STEPS (DIM / 16)    // products of 16 numbers in a score
#define COLUMNS (DIM / 8)   // numbers of a value that a lane takes
#define KWORDS (EACH * KB / 32)
#define VWORDS (COLUMNS * VB / 32)
#define SUM_ROW (DIM + 8)   // so that the rows of a tile begin in other banks
#define FIELDS 8            // of a part in `work`
#define INF __int_as_float(0x7f800000)

struct Attention {
    const u16* q; const u32* k; const u32* v; const u16* k_scales; const u16* v_scales; const u16* k_new; const u16* v_new; u16* out;
    const int* table; const int* lengths; const int* work;
    float* sums; float* tops; float* totals;    // of each part: [tiles][16][DIM], [tiles][16]
    u32* done;                                  // [sequences][key heads][tiles], zero before and after
    int queries, pitch, window, kv_heads, group, parts_rows;
    float scale, softcap;
};

__device__ __forceinline__ float exp2_of(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
template <int WORDS> __device__ __forceinline__ void load(u32 (&w)[WORDS], const u32* from) {
    if constexpr (WORDS % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < WORDS / 4; i++) {
            const uint4 v = __ldg((const uint4*)from + i);
            w[4 * i] = v.x; w[4 * i + 1] = v.y; w[4 * i + 2] = v.z; w[4 * i + 3] = v.w;
        }
    } else if constexpr (WORDS == 2) { const uint2 v = __ldg((const uint2*)from); w[0] = v.x; w[1] = v.y; }
    else w[0] = __ldg(from);
}

// Turning. A warp has 64 numbers of a row, lane t those at 2t and 2t + 1

__device__ __forceinline__ u32 turned(u32 v, int lane) {
    #pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const u32 other = __shfl_xor_sync(~0u, v, i);
        v = add2(lane & i ? v ^ 0x80008000 : v, other);
    }
    return v;
}
__device__ __forceinline__ float2 turned(float2 v, int lane) {
    #pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const float x = __shfl_xor_sync(~0u, v.x, i), y = __shfl_xor_sync(~0u, v.y, i);
        v = lane & i ? make_float2(x - v.x, y - v.y) : make_float2(x + v.x, y + v.y);
    }
    return make_float2(v.x / 32, v.y / 32);
}

// Quantise 64 turned numbers, as the package does

template <int BITS> __device__ __forceinline__ u32 level(float x, float inverse, bool zero) {
    const float share = wide((u16)halves(x * inverse, 0.f));
    const float place = wide((u16)halves(share * (1 << (BITS - 1)) + (1 << (BITS - 1)), 0.f));
    return zero || share != share ? 0 : min(max(__float2int_rn(place), 0), (1 << BITS) - 1);
}
template <int BITS> __device__ __forceinline__ void store(u32 v, int lane, u32* pages, u16* scales, size_t head, int part) {
    const float x = wide((u16)v), y = wide((u16)(v >> 16));
    float most = fmaxf(fabsf(x), fabsf(y)), inverse;
    #pragma unroll
    for (int i = 8; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(inverse) : "f"(most));
    const u32 both = level<BITS>(x, inverse, most == 0) | level<BITS>(y, inverse, most == 0) << BITS;
    const size_t at = (head * DIM + part * 64) / 2 + lane;
    if constexpr (BITS == 8) ((u16*)pages)[at] = (u16)both; else ((unsigned char*)pages)[at] = (unsigned char)both;
    if (!(lane & 15)) scales[(head * DIM + part * 64) / 32 + lane / 16] = (u16)halves(most / (1 << (BITS - 1)), 0.f);
}
__device__ __forceinline__ size_t slot_of(const int* table, int token) { return (size_t)table[token / PAGE] * PAGE + token % PAGE; }

// Levels of packed words, less the zero, times scale

__device__ __forceinline__ u32 weight(u32 levels, u32 zero, u32 scale) { return mul2(add2(levels, zero), scale); }
template <int BITS> __device__ __forceinline__ u32 zero_of() { return BITS == 8 ? 0xe480e480 : 0xe408e408; }  // -(1024 + 2^(BITS - 1)), twice

// A lane's keys for step s: numbers 4s .. 4s + 3 of its EACH (8 bits), or 0, 4, 1, 5 and 2, 6, 3, 7 of eight (4 bits)
template <int S> __device__ __forceinline__ void key(const u32 (&w)[KWORDS], const u32* scales, u32& low, u32& high) {
    const u32 scale = scales[S * 4 / 32];
    if constexpr (KB == 8) {
        low = weight(__byte_perm(w[S], 0x64646464, 0x4140), zero_of<8>(), scale);
        high = weight(__byte_perm(w[S], 0x64646464, 0x4342), zero_of<8>(), scale);
    } else {
        const u32 v = w[S / 2] >> (S % 2 * 8);
        low = weight((v & 0x000f000f) | 0x64006400, zero_of<4>(), scale);
        high = weight((v >> 4 & 0x000f000f) | 0x64006400, zero_of<4>(), scale);
    }
}
// Where number d of a row of q, or of a new key, stands among the halves of a lane's steps: lane t, then step, then 0 .. 3
__device__ __forceinline__ int place_of(int d) {
    const int t = d / EACH, e = d % EACH;
    if (KB == 8) return t * EACH + e;
    const int f = e % 8;
    return t * EACH + (e / 8 * 2 + f % 4 / 2) * 4 + f % 2 * 2 + f / 4;
}
// Values of two keys at number J of a lane's COLUMNS
template <int J> __device__ __forceinline__ u32 value(const u32 (&a)[VWORDS], const u32 (&b)[VWORDS], u32 scales) {
    if constexpr (VB == 8) {
        const u32 pair = __byte_perm(a[J / 4], b[J / 4], J % 4 < 2 ? 0x5410 : 0x7632);
        return weight((pair >> (J % 2 * 8) & 0x00ff00ff) | 0x64006400, zero_of<8>(), scales);
    } else {
        const u32 pair = __byte_perm(a[J / 8], b[J / 8], J % 8 < 4 ? 0x5410 : 0x7632);
        return weight((pair >> (J % 4 * 4) & 0x000f000f) | 0x64006400, zero_of<4>(), scales);
    }
}
template <int N> struct Number { static constexpr int value = N; };
template <int N, class F> __device__ __forceinline__ void each(F f) {
    if constexpr (N) { each<N - 1>(f); f(Number<N - 1>()); }
}

// What a warp has summed: rows g and g + 8 of the tile; numbers COLUMNS * n + j of n = 2t, 2t + 1
struct Sums { float o[COLUMNS][4]; float top[2], total[2]; };

// Scores become weights: of keys first + 2t, + 1 (a), and first + 8 + 2t, + 1 (b). limit: keys of [0, limit) are seen
__device__ __forceinline__ void weigh(Sums& s, float (&a)[4], float (&b)[4], const Attention& l, int first, int t, const int (&from)[2], const int (&limit)[2]) {
    const float log2e = 1.4426950408889634f;
    float most[2] = {s.top[0], s.top[1]};
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        float& score = i < 4 ? a[i] : b[i - 4];
        const int row = i % 4 / 2, at = first + 2 * t + i % 2 + i / 4 * 8;
        if (l.softcap != 0) score = l.softcap * log2e * (1 - 2 / (exp2_of(score * l.scale * (2 * log2e / l.softcap)) + 1));
        else score *= l.scale * log2e;
        if (at < from[row] || at >= limit[row]) score = -INF;
        most[row] = fmaxf(most[row], score);
    }
    #pragma unroll
    for (int row = 0; row < 2; row++) {
        most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 1));
        most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 2));
        const float shift = most[row] == -INF ? 0 : most[row], fade = exp2_of(s.top[row] - shift);
        s.top[row] = most[row];
        s.total[row] *= fade;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * row + i] = exp2_of(a[2 * row + i] - shift);
            b[2 * row + i] = exp2_of(b[2 * row + i] - shift);
            s.total[row] += a[2 * row + i] + b[2 * row + i];
        }
        if (__any_sync(~0u, fade != 1)) {
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) { s.o[j][2 * row] *= fade; s.o[j][2 * row + 1] *= fade; }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ Attention l) {
    extern __shared__ __align__(16) float shared[];
    float* sum = shared;                                       // [WARPS][parts_rows][SUM_ROW], number d at place d % COLUMNS * 8 + d / COLUMNS
    u16* q_turned = (u16*)(sum + WARPS * l.parts_rows * SUM_ROW); // [STEPS][lane][8 halves]: a0 .. a3 of a step
    u16* k_fresh = q_turned + 16 * DIM;                        // [16 keys][DIM], each row as place_of has it
    u16* v_fresh = k_fresh + 16 * DIM;                         // [16 keys][DIM]
    __shared__ float tops[WARPS][16], totals[WARPS][16];
    __shared__ int last_part;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int kv = blockIdx.y, tile = blockIdx.z, tiles = gridDim.z;
    const int rows = min(16, l.queries * l.group - tile * 16);
    auto q_row = [&](int sequence, int row) {
        const int r = tile * 16 + row;
        return ((size_t)(sequence * l.queries + r / l.group) * l.kv_heads + kv) * l.group + r % l.group;
    };
    for (int i = threadIdx.x; i < 16 * DIM / 2; i += THREADS) ((u32*)q_turned)[i] = 0;
    for (int item = blockIdx.x, items = item + 1; item < items; item += gridDim.x) {
        const int4 part = __ldg((const int4*)(l.work + item * FIELDS)), more = __ldg((const int4*)(l.work + item * FIELDS) + 1);
        const int sequence = part.x, first = part.y, end = part.z, parts = part.w, first_item = more.x;
        items = more.y;
        if (item >= items) break;
        const int past = l.lengths[sequence], *table = l.table + (size_t)sequence * l.pitch;
        const bool newest = item == first_item + parts - 1;
        u32 k[2][KWORDS], v[4][VWORDS], k_scale[2][(EACH + 31) / 32], v_scale[2];
        auto fetch_keys = [&](int at) {
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const size_t head = (slot_of(table, at) + g + 8 * i) * l.kv_heads + kv;
                load(k[i], l.k + (head * DIM + t * EACH) * KB / 32);
                #pragma unroll
                for (int j = 0; j < (EACH + 31) / 32; j++) {
                    const u32 scale = __ldg(l.k_scales + head * (DIM / 32) + t * EACH / 32 + j);
                    k_scale[i][j] = both(scale, scale);
                }
            }
        };
        auto fetch_values = [&](int at) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = 2 * t + i % 2 + i / 2 * 8;
                const size_t head = (slot_of(table, at) + key) * l.kv_heads + kv;
                load(v[i], l.v + (head * DIM + g * COLUMNS) * VB / 32);
                const u32 scale = at + key < end ? __ldg(l.v_scales + head * (DIM / 32) + g * COLUMNS / 32) : 0;
                v_scale[i / 2] = i % 2 ? both(v_scale[i / 2], scale) : scale;
            }
        };
        // All that is read for this item is asked for before anything is waited for.
        const int begin = first + warp * 16;
        u32 queries[DIM / 64 * 16 / WARPS];
        #pragma unroll
        for (int i = 0; i < DIM / 64 * 16 / WARPS; i++) {
            const int unit = warp + i * WARPS;
            if (unit < rows * (DIM / 64)) queries[i] = *(const u32*)(l.q + q_row(sequence, unit / (DIM / 64)) * DIM + unit % (DIM / 64) * 64 + 2 * lane);
        }
        if (begin < end) { fetch_keys(begin); fetch_values(begin); }
        __syncthreads();  // the item before is finished
        #pragma unroll
        for (int i = 0; i < DIM / 64 * 16 / WARPS; i++) {
            const int unit = warp + i * WARPS;
            if (unit >= rows * (DIM / 64)) break;
            const int row = unit / (DIM / 64), d = unit % (DIM / 64) * 64 + 2 * lane;
            const u32 v = queries[i];
            const float2 f = turned(make_float2(wide((u16)v), wide((u16)(v >> 16))), lane);
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = place_of(d + e), step = at % EACH / 4, of_lane = (row & 7) * 4 + at / EACH;
                q_turned[((step * 32 + of_lane) * 4 + at % 4 / 2 * 2 + (row >> 3)) * 2 + at % 2] = (u16)halves(e ? f.y : f.x, 0.f);
            }
        }
        if (newest) for (int unit = warp; unit < l.queries * (DIM / 64) * 2; unit += WARPS) {
            const int of_value = unit & 1, token = (unit >> 1) / (DIM / 64), block = (unit >> 1) % (DIM / 64), d = block * 64 + 2 * lane;
            const size_t head = (size_t)(sequence * l.queries + token) * l.kv_heads + kv;
            const u32 v = turned(*(const u32*)((of_value ? l.v_new : l.k_new) + head * DIM + d), lane);
            if (of_value) *(u32*)(v_fresh + token * DIM + d) = v;
            else { k_fresh[token * DIM + place_of(d)] = (u16)v; k_fresh[token * DIM + place_of(d + 1)] = (u16)(v >> 16); }
            if (tile) continue;
            const size_t to = slot_of(table, past + token) * l.kv_heads + kv;
            if (of_value) store<VB>(v, lane, (u32*)l.v, (u16*)l.v_scales, to, block); else store<KB>(v, lane, (u32*)l.k, (u16*)l.k_scales, to, block);
        }
        __syncthreads();
        Sums s = {};
        s.top[0] = s.top[1] = -INF;
        int query[2], from[2], limit[2] = {end, end};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            query[i] = (tile * 16 + g + 8 * i) / l.group;
            from[i] = l.window < 0 ? 0 : past + query[i] - l.window;
        }
        const uint4* q = (const uint4*)q_turned + lane;
        #pragma unroll 1
        for (int at = begin, next; at < end; at = next) {
            next = at + WARPS * 16;
            float a[4] = {}, b[4] = {};
            each<STEPS>([&](auto step) {
                const uint4 x = q[step.value * 32];
                u32 low, high;
                key<step.value>(k[0], k_scale[0], low, high);
                mma(a, x.x, x.y, x.z, x.w, low, high);
                key<step.value>(k[1], k_scale[1], low, high);
                mma(b, x.x, x.y, x.z, x.w, low, high);
            });
            if (next < end) fetch_keys(next);  // read while this block's values are summed
            weigh(s, a, b, l, at, t, from, limit);
            const u32 p0 = halves(a[0], a[1]), p1 = halves(a[2], a[3]), p2 = halves(b[0], b[1]), p3 = halves(b[2], b[3]);
            each<COLUMNS>([&](auto j) { mma(s.o[j.value], p0, p1, p2, p3, value<j.value>(v[0], v[1], v_scale[0]), value<j.value>(v[2], v[3], v_scale[1])); });
            if (next < end) fetch_values(next);
        }
        if (newest && warp == 0) {
            float a[4] = {}, b[4] = {};
            #pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const uint4 x = q[step * 32];
                uint2 n0 = {}, n1 = {};
                if (g < l.queries) n0 = *(const uint2*)(k_fresh + g * DIM + t * EACH + step * 4);
                if (g + 8 < l.queries) n1 = *(const uint2*)(k_fresh + (g + 8) * DIM + t * EACH + step * 4);
                mma(a, x.x, x.y, x.z, x.w, n0.x, n0.y);
                mma(b, x.x, x.y, x.z, x.w, n1.x, n1.y);
            }
            const int since[2] = {from[0] - past, from[1] - past}, until[2] = {min(query[0] + 1, l.queries), min(query[1] + 1, l.queries)};
            weigh(s, a, b, l, 0, t, since, until);
            const u32 p0 = halves(a[0], a[1]), p1 = halves(a[2], a[3]), p2 = halves(b[0], b[1]), p3 = halves(b[2], b[3]);
            auto fresh = [&](int token, int j) -> u32 { return token < l.queries ? v_fresh[token * DIM + g * COLUMNS + j] : 0; };
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                mma(s.o[j], p0, p1, p2, p3, both(fresh(2 * t, j), fresh(2 * t + 1, j)), both(fresh(2 * t + 8, j), fresh(2 * t + 9, j)));
        }
        // The warps' sums, in their order
        #pragma unroll
        for (int row = 0; row < 2; row++) {
            float total = s.total[row];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (!t) { tops[warp][g + 8 * row] = s.top[row]; totals[warp][g + 8 * row] = total; }
        }
        __syncthreads();
        auto most_of = [&](int row) { return fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row])); };
        auto share = [&](float top, float most) { return most == -INF ? 0 : exp2_of(top - most); };
        const float fade[2] = {share(s.top[0], most_of(g)), share(s.top[1], most_of(g + 8))};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            if (g + 8 * i >= rows) continue;
            float* to = sum + (warp * l.parts_rows + g + 8 * i) * SUM_ROW + 2 * t;
            #pragma unroll
            for (int j = 0; j < COLUMNS; j++) *(float2*)(to + 8 * j) = make_float2(s.o[j][2 * i] * fade[i], s.o[j][2 * i + 1] * fade[i]);
        }
        __syncthreads();
        auto summed = [&](int row, int place) {
            float4 all = *(const float4*)(sum + row * SUM_ROW + place);
            #pragma unroll
            for (int w = 1; w < WARPS; w++) {
                const float4 f = *(const float4*)(sum + (w * l.parts_rows + row) * SUM_ROW + place);
                all.x += f.x; all.y += f.y; all.z += f.z; all.w += f.w;
            }
            return all;
        };
        auto total_of = [&](int row, float most) {
            float total = 0;
            for (int w = 0; w < WARPS; w++) total += totals[w][row] * share(tops[w][row], most);
            return total;
        };
        if (parts == 1) {
            for (int i = threadIdx.x; i < rows * DIM / 4; i += THREADS) {
                const int row = i * 4 / DIM, place = i * 4 % DIM;
                const float4 all = summed(row, place);
                const float total = total_of(row, most_of(row));
                *(float4*)(sum + row * SUM_ROW + place) = make_float4(all.x / total, all.y / total, all.z / total, all.w / total);
            }
        } else {
            const size_t mine = ((size_t)item * l.kv_heads + kv) * tiles + tile;
            for (int i = threadIdx.x; i < rows * DIM / 4; i += THREADS) ((float4*)(l.sums + mine * l.parts_rows * DIM))[i] = summed(i * 4 / DIM, i * 4 % DIM);
            if (threadIdx.x < rows) {
                const float most = most_of(threadIdx.x);
                l.tops[mine * l.parts_rows + threadIdx.x] = most;
                l.totals[mine * l.parts_rows + threadIdx.x] = total_of(threadIdx.x, most);
            }
            // All threads have written (the barrier); one releases that with its count, and acquires what others wrote.
            __syncthreads();
            if (threadIdx.x == 0) {
                u32 before, *count = l.done + (sequence * l.kv_heads + kv) * tiles + tile;
                asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
                last_part = before == parts - 1;
                if (last_part) *count = 0;
            }
            __syncthreads();
            if (!last_part) continue;
            const size_t apart = (size_t)l.kv_heads * tiles * l.parts_rows, one = (((size_t)first_item * l.kv_heads + kv) * tiles + tile) * l.parts_rows;
            for (int i = threadIdx.x; i < rows * DIM / 4; i += THREADS) {
                const int row = i * 4 / DIM;
                float most = -INF, total = 0;
                for (int p = 0; p < parts; p++) most = fmaxf(most, __ldcg(l.tops + one + p * apart + row));
                float4 all = {};
                #pragma unroll 4
                for (int p = 0; p < parts; p++) {
                    const size_t at = one + p * apart + row;
                    const float w = share(__ldcg(l.tops + at), most);
                    const float4 f = __ldcg((const float4*)(l.sums + at * DIM) + i % (DIM / 4));
                    total += __ldcg(l.totals + at) * w;
                    all.x += f.x * w; all.y += f.y * w; all.z += f.z * w; all.w += f.w * w;
                }
                *(float4*)(sum + row * SUM_ROW + i * 4 % DIM) = make_float4(all.x / total, all.y / total, all.z / total, all.w / total);
            }
        }
        __syncthreads();
        for (int unit = warp; unit < rows * (DIM / 64); unit += WARPS) {
            const int row = unit / (DIM / 64), d = unit % (DIM / 64) * 64 + 2 * lane;
            const float* from = sum + row * SUM_ROW + d % COLUMNS * 8 + d / COLUMNS;
            const float2 f = turned(make_float2(from[0], from[8]), lane);
            *(u32*)(l.out + q_row(sequence, row) * DIM + d) = halves(f.x, f.y);
        }
    }
}

// Quantise tokens behind the first lengths[b] of each sequence, from fp16 pages as many as the cache has. A warp for each
// token and head. Grid: blocks of WARPS tokens, key heads, sequences
struct Quantise { const u16* k; const u16* v; u32* k_pages; u32* v_pages; u16* k_scales; u16* v_scales; const int* table; const int* lengths; int queries, pitch, kv_heads; };
extern "C" __global__ void __launch_bounds__(THREADS) quantise(const __grid_constant__ Quantise l) {
    const int lane = threadIdx.x & 31, token = blockIdx.x * WARPS + (threadIdx.x >> 5), sequence = blockIdx.z;
    if (token >= l.queries) return;
    const size_t head = slot_of(l.table + (size_t)sequence * l.pitch, l.lengths[sequence] + token) * l.kv_heads + blockIdx.y;
    for (int block = 0; block < DIM / 64; block++) {
        store<KB>(turned(((const u32*)(l.k + head * DIM + block * 64))[lane], lane), lane, l.k_pages, l.k_scales, head, block);
        store<VB>(turned(((const u32*)(l.v + head * DIM + block * 64))[lane], lane), lane, l.v_pages, l.v_scales, head, block);
    }
}

// What all kernels of this engine use. Their sources stand behind this text.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// Two halves in a register

__device__ __forceinline__ u32 add2(u32 a, u32 b) { u32 r; asm("add.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
__device__ __forceinline__ u32 both(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }
__device__ __forceinline__ u32 lows(u32 a) { return __byte_perm(a, a, 0x1010); }
__device__ __forceinline__ u32 highs(u32 a) { return __byte_perm(a, a, 0x3232); }
__device__ __forceinline__ float wide(u16 h) { float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h)); return f; }
__device__ __forceinline__ u32 halves(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ constexpr int log2_of(int v) { return v > 1 ? 1 + log2_of(v / 2) : 0; }
__device__ constexpr u32 minus(int v) { return (0x8000u | (log2_of(v) + 15) << 10 | ((v << (10 - log2_of(v))) & 0x3ff)) * 0x10001u; }  // -v, 1 <= v <= 2048
__device__ constexpr u32 power(int v) { return ((15 + v) << 10) * 0x10001u; }  // 2^v, twice

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

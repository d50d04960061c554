// The package's own CUDA kernels for GPTQ and EXL2 matrices (cuda/q_matrix.cu, cuda/q_gemm_kernel_gptq.cuh,
// cuda/q_gemm_kernel.cuh), compiled for the CPU.
//
// The threads of a block run one after the other. The values that they leave in shared memory for each other are
// complete only when all threads have run. So every block runs twice, and its first results are discarded.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __syncthreads()

using std::min;
struct half { _Float16 value; };
struct half2 { half x, y; };
struct int4 { int x, y, z, w; };
struct dim3 { int x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx;

// Every operation rounds once, to nearest even.
inline half rounded(double x) { return {(_Float16) x}; }
inline double wide(half x) { return x.value; }
inline half __int2half_rn(int x) { return rounded(x); }
inline half __float2half_rn(float x) { return rounded(x); }
inline half __hadd(half a, half b) { return rounded(wide(a) + wide(b)); }
inline half __hsub(half a, half b) { return rounded(wide(a) - wide(b)); }
inline half __hmul(half a, half b) { return rounded(wide(a) * wide(b)); }
inline half __hfma(half a, half b, half c) { return rounded(wide(a) * wide(b) + wide(c)); }
inline float __half2float(half x) { return wide(x); }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 __half2half2(half a) { return {a, a}; }
inline half __low2half(half2 a) { return a.x; }
inline half __high2half(half2 a) { return a.y; }
inline float __low2float(half2 a) { return wide(a.x); }
inline float __high2float(half2 a) { return wide(a.y); }
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline uint32_t __funnelshift_rc(uint32_t low, uint32_t high, uint32_t shift)
{
    return ((uint64_t) high << 32 | low) >> (shift < 32 ? shift : 32);
}
inline void atomicAdd(half2* sum, half2 value) { *sum = __hadd2(*sum, value); }

#define _compat_cuh // atomicAdd for GPUs that lack it
#include "cuda/q_gemm_kernel_gptq.cuh"
#include "cuda/q_gemm_kernel.cuh"
#define THREADS_X 32
#define BLOCK_KN_SIZE 128
#include "kernels_of_q_matrix.inc" // cut out of q_matrix.cu by the test

template <typename Kernel> static void launch(dim3 grid, int threads, Kernel kernel)
{
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
                for (int pass = 0; pass < 2; pass++)
                    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(pass);
}

static int parts(int size, int part) { return (size + part - 1) / part; }

// QMatrix::QMatrix: perm is null, or the order that QMatrix::make_sequential makes of g_idx
extern "C" void prepare(uint32_t* weight, const uint16_t* perm, int height, int width)
{
    if (perm)
    {
        std::vector<uint32_t> in_order(height / 8 * width);
        launch({parts(width, 32), height / 8}, 32, [&](int) {
            make_sequential_kernel(weight, in_order.data(), perm, height / 8, width);
        });
        std::copy(in_order.begin(), in_order.end(), weight);
    }
    launch({parts(width, 32)}, 32, [&](int pass) {
        if (pass) shuffle_kernel(weight, height, width, 0, 0, 0, height, height, height); // in place
    });
}

// QMatrix::reconstruct: out is [height, width]
extern "C" void reconstruct(
    const uint32_t* weight, const uint16_t* perm, const uint32_t* zeros, const half* scales, int height, int width,
    int group_size, int groups, half* out)
{
    static int tallest = 0; // the first pass uses the order of rows that an earlier matrix left
    tallest = std::max(tallest, height);
    std::vector<half> thrown_away(tallest * width);
    launch({parts(width, 512), parts(height, 128)}, 128, [&](int pass) {
        reconstruct_gptq_kernel(
            weight, perm, zeros, scales, height, width, group_size, groups, pass ? out : thrown_away.data(), height, 0,
            height);
    });
}

// gemm_half_q_half_cuda of few rows: a is [rows, height], out [rows, width]
extern "C" void multiply(
    const half* a, const uint32_t* weight, const uint16_t* perm, const uint32_t* zeros, const half* scales, int rows,
    int height, int width, int group_size, int groups, half* out)
{
    std::vector<half> thrown_away(rows * width);
    launch({parts(width, 512), parts(rows, MAX_Q_GEMM_ROWS_KERNEL), parts(height, 128)}, 128, [&](int pass) {
        gemm_half_q_half_gptq_kernel<MAX_Q_GEMM_ROWS_KERNEL, false, false>(
            a, weight, zeros, scales, pass ? out : thrown_away.data(), rows, width, height, groups, group_size, perm,
            height, true, nullptr, 0);
    });
}

// QMatrix::reconstruct of an EXL2 matrix that has 4 bits everywhere: out is [height, width]
extern "C" void reconstruct_exl2(
    const uint32_t* weight, const uint16_t* perm, const uint32_t* scale, const half* scale_max,
    const uint16_t* group_map, int height, int width, int groups, half* out)
{
    std::vector<half> thrown_away(height * width);
    launch({parts(width, 128), parts(height, 128)}, 128, [&](int pass) {
        reconstruct_kernel(
            weight, perm, scale, scale_max, group_map, height, width, groups, pass ? out : thrown_away.data(), 0, 0, 0,
            height, height, height, 0, height);
    });
}

// gemm_half_q_half_cuda of few rows and an EXL2 matrix that has 4 bits everywhere: a is [rows, height]
template <int block>
static void multiply_exl2(
    const half* a, const uint32_t* weight, const uint16_t* perm, const uint32_t* scale, const half* scale_max,
    const uint16_t* group_map, int rows, int height, int width, int groups, half* out)
{
    std::vector<half> thrown_away(rows * width);
    launch({parts(width, 4 * block), parts(rows, MAX_Q_GEMM_ROWS_KERNEL), parts(height, block)}, block, [&](int pass) {
        gemm_half_q_half_kernel<MAX_Q_GEMM_ROWS_KERNEL, 0b00001000, false, false, block>(
            a, weight, scale, scale_max, pass ? out : thrown_away.data(), rows, width, height, groups, group_map, perm,
            0, 0, 0, height, height, height, true, nullptr, 0);
    });
}

extern "C" void multiply_exl2_32(
    const half* a, const uint32_t* weight, const uint16_t* perm, const uint32_t* scale, const half* scale_max,
    const uint16_t* group_map, int rows, int height, int width, int groups, half* out)
{
    multiply_exl2<32>(a, weight, perm, scale, scale_max, group_map, rows, height, width, groups, out);
}

extern "C" void multiply_exl2_64(
    const half* a, const uint32_t* weight, const uint16_t* perm, const uint32_t* scale, const half* scale_max,
    const uint16_t* group_map, int rows, int height, int width, int groups, half* out)
{
    multiply_exl2<64>(a, weight, perm, scale, scale_max, group_map, rows, height, width, groups, out);
}

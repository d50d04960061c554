// The steps of sample_basic (exllamav2_ext/ext_sampling.cpp) over the package's own cpp/sampling.cpp, without PyTorch.
// Writes the probabilities of the draw, by token id, to `out`.
#include "cpp/sampling.h"
#include <cmath>
#include <vector>

extern "C" int draw(
    int vocab, const float* logits, float temperature, int top_k, float top_p, float tfs, float typical, float random,
    float post_temperature, float min_temp, float max_temp, float temp_exponent, float smoothing_factor, float skew,
    int mirostat, float* mu, float tau, float eta, float* out)
{
    int size = (vocab + 31) / 32 * 32;
    float* probs = (float*) aligned_alloc(32, size * sizeof(float));
    std::vector<int> ids(size);
    for (int i = 0; i < vocab; i++) ids[i] = i;
    float exponent = 1.0f;
    if (smoothing_factor > 0) { exponent = 2.0f; temperature /= smoothing_factor; }
    int best = softmax_cpu(vocab, temperature, logits, nullptr, exponent, probs);
    int n = vocab, *p = ids.data();
    if (top_k > 0 && top_k < vocab) { n = top_k_cpu(n, probs, p, top_k, best); normalize_cpu(n, probs); }
    if (n > 1 && top_p > 0 && top_p < 1) { n = top_p_cpu(n, probs, p, top_p); normalize_cpu(n, probs); }
    if (n > 1 && tfs > 0 && tfs < 1) { n = tfs_cpu(n, probs, p, tfs); normalize_cpu(n, probs); }
    if (n > 1 && typical > 0 && typical < 1) { n = typical_cpu(n, probs, p, typical); normalize_cpu(n, probs); }
    if (n > 1 && mirostat) { n = mirostat_pre_cpu(n, probs, p, *mu, tau, eta); normalize_cpu(n, probs); }
    if (n > 1 && (post_temperature != 1.0f || max_temp > min_temp))
        n = post_softmax_temperature(n, probs, p, post_temperature, min_temp, max_temp, temp_exponent);
    if (skew != 0) { sort_descending(n, probs, p, 0); random = powf(random, expf(-skew)); }
    for (int i = 0; i < vocab; i++) out[i] = 0;
    for (int i = 0; i < n; i++) out[p[i]] = probs[i];
    multinomial_cpu(n, probs, p, random * 0.9998);
    int token = p[0];
    if (mirostat) *mu = mirostat_post_cpu(n, probs, p, *mu, tau, eta);
    free(probs);
    return token;
}

extern "C" void penalize(
    int vocab, const uint64_t* sequence, float penalty, int sustain, int decay, int length, float* logits)
{
    apply_rep_penalty_cpu(vocab, sequence, penalty, sustain, decay, 0, 0, length, logits);
}

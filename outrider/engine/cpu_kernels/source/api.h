// The C interface that Python calls. It does not use torch, so the library is built without
// torch and works with any version. Pointers point to memory of the caller; shapes are
// row-major and contiguous unless a stride is given. The caller checks sizes and dtypes
// (../operators.py). No function throws, keeps state, or allocates memory beyond the call,
// except for teams, workspaces and samplers: each has a function that frees it, and is null
// if there is no memory. ../interface.py parses this header and sampler_api.h; its docstring
// describes the subset of C that it understands.
#pragma once

#include <stdint.h>

#define OUTRIDER_API extern "C" __attribute__((visibility("default")))

// From OUTRIDER_INT8 on, the types are for weights only (panels_quantised.h).
enum OutriderType : int32_t {
  OUTRIDER_FLOAT32 = 0,
  OUTRIDER_BFLOAT16 = 1,
  OUTRIDER_INT8 = 2,  // one scale for each output feature
  OUTRIDER_INT8_GROUPS_16 = 3,
  OUTRIDER_INT8_GROUPS_32 = 4,
  OUTRIDER_INT8_GROUPS_32_MINIMA = 5,
  OUTRIDER_INT4_GROUPS_32 = 6,
  OUTRIDER_INT4_GROUPS_32_MINIMA = 7,
  OUTRIDER_INT4_ZEROS = 8
};

struct OutriderTeam;       // threads
struct OutriderWorkspace;  // scratch memory of one runner, which grows to its largest step

// 0 or an errno, which Python raises. After ENOMEM (no scratch memory) nothing was computed.
typedef int32_t OutriderStatus;

OUTRIDER_API const char* outrider_path(void);  // "portable", "avx512", "avx512_bf16" or "amx"

// Requests from the system what the path needs (AMX tiles must be enabled for each process).
// Returns 0 or an errno.
OUTRIDER_API int32_t outrider_prepare_process(void);

OUTRIDER_API OutriderTeam* outrider_team_create(int32_t num_threads);
OUTRIDER_API void outrider_team_free(OutriderTeam* team);
OUTRIDER_API OutriderWorkspace* outrider_workspace_create(void);
OUTRIDER_API void outrider_workspace_free(OutriderWorkspace* workspace);

// The parts of a decoder step whose time is measured.
enum OutriderPhase : int32_t {
  OUTRIDER_LINEAR = 0,
  OUTRIDER_ATTENTION = 1,
  OUTRIDER_NORM = 2,
  OUTRIDER_ROPE = 3,  // including the writes to the cache
  OUTRIDER_HEAD = 4,  // the output layer, including the norm before it
  OUTRIDER_NUM_PHASES = 5
};

// Starts or stops measuring the decoder steps of this workspace.
OUTRIDER_API void outrider_workspace_measure(OutriderWorkspace* workspace, int32_t is_on);

// Writes the nanoseconds since the last call, by OutriderPhase, to spent [OUTRIDER_NUM_PHASES].
OUTRIDER_API void outrider_workspace_take_times(OutriderWorkspace* workspace, int64_t* spent);

// ---- linear.cpp

// A packed linear layer y = x W^T + b. For the layout see panels.h.
struct OutriderMatrix {
  const void* packed;
  const float* bias;    // [out_features] or null
  const float* scales;  // [out_features] for INT8, otherwise null
  int64_t out_features;
  int64_t in_features;
  int32_t type;       // OutriderType
  int32_t unit_size;  // inputs of one unit of a quantised weight, or 0: see panels_quantised.h
};

// Returns the size of a packed plain weight, FLOAT32 or BFLOAT16, in bytes.
OUTRIDER_API int64_t outrider_packed_size(int32_t type, int64_t out_features, int64_t in_features);

// Packs rows [first, first + num) of a plain weight [out_features, in_features], given as `from`
// [num, in_features]. Several calls fill one matrix with projections that are computed
// together. `interleave` 1: panels of the first half of out_features (gate) alternate with
// panels of the second (up), as the decoder needs them.
OUTRIDER_API OutriderStatus outrider_pack(OutriderTeam* team, int32_t type, const void* from, int64_t first,
                                          int64_t num, int64_t out_features, int64_t in_features, int32_t interleave,
                                          void* packed);

// Returns what is added to 8-bit codes when quantised weights are packed (../group_packing.py).
OUTRIDER_API int32_t outrider_code_offset(void);

// Unpacks one row of the weight, for embeddings that are tied to the output layer.
OUTRIDER_API OutriderStatus outrider_unpack_row(const OutriderMatrix* matrix, int64_t row, float* to);

// Computes y = x W^T + b. x [num_rows, in_features] and y [num_rows, out_features] have the
// activations' type, FLOAT32 or BFLOAT16.
OUTRIDER_API OutriderStatus outrider_linear(OutriderTeam* team, OutriderWorkspace* workspace, int32_t activation_type,
                                            const void* x, int64_t num_rows, const OutriderMatrix* matrix, void* y);

// ---- experts.cpp: layers with a mixture of experts

// The experts of a layer: y = down (act(gate x) * up x), with an `activation`:
//   0: act(gate) = gate * sigmoid(gate)
//   1: the tanh approximation of GELU
//   2: gate * sigmoid(alpha * gate) for a gate of at most `limit`, and an up from -limit to limit to which `shift` is
//      added; a limit of 0 is none
struct OutriderExperts {
  int64_t num_experts;
  int64_t hidden_size;
  int64_t intermediate_size;
  const OutriderMatrix* gate_up;  // [num_experts], each interleaved
  const OutriderMatrix* down;     // [num_experts], of the same type as gate_up
  int32_t activation;
  float alpha;
  float limit;
  float shift;
};

// Computes the weighted sum of each row's experts. x and y: [num_rows, hidden_size] of the activations' type, FLOAT32
// or BFLOAT16; expert_ids and weights: [num_rows, num_slots]. The slots of a row are added in their order, so a row's
// bits do not depend on other rows. A slot whose id is not from 0 to num_experts - 1 adds nothing. `is_summed` 0: the
// weighted slots are not added, and y is [num_rows, num_slots, hidden_size] FLOAT32.
OUTRIDER_API OutriderStatus outrider_experts(OutriderTeam* team, OutriderWorkspace* workspace, int32_t activation_type,
                                             const OutriderExperts* experts, const void* x, int64_t num_rows,
                                             const int64_t* expert_ids, const float* weights, int64_t num_slots,
                                             int32_t is_summed, void* y);

// ---- rms_norm.cpp: y = x / sqrt(mean(x^2) + epsilon) * weight, row by row; weight is float32. `rounds_once` 0: the
// normalised values are also rounded to `type` before they are multiplied by the weight.
OUTRIDER_API OutriderStatus outrider_rms_norm(OutriderTeam* team, int32_t type, const void* x, int64_t num_rows,
                                              int64_t width, const float* weight, float epsilon, int32_t rounds_once,
                                              void* y);

// ---- low_rank.h: adapters (LoRA)

// An adapter's part of a product: y += up (down x). Where layers are joined in one matrix, `down` has the components of
// all of them, and each panel of 16 outputs uses those of its own layer.
struct OutriderLowRank {
  const float* down;      // [rank, in_features]
  const float* up;        // by panel, in the matrix's order: [components of the panel, 16]
  const int32_t* starts;  // [panels + 1]: each panel's first component in `up`
  const int32_t* firsts;  // [panels]: each panel's first component among the `rank` ones
  int64_t rank;           // 0: the adapter does not change the matrix
};

// The part of an adapter in one layer of a decoder.
struct OutriderLayerAdapter {
  OutriderLowRank qkv;
  OutriderLowRank output;
  OutriderLowRank gate_up;
  OutriderLowRank down;
};

// ---- the rows of one step (see input_batch.py)

struct OutriderBatch {
  int64_t num_rows;
  int64_t num_logits;               // rows with logits; for other rows the last layer computes only keys and values
  int64_t num_seqs;
  int64_t block_size;
  const int64_t* token_ids;         // [num_rows]
  const int64_t* positions;         // [num_rows]
  const int64_t* slots;             // [num_rows]; those of other groups of layers follow (`group_of`)
  const int32_t* query_start_loc;   // [num_seqs + 1]
  const int32_t* seq_lens;          // [num_seqs]
  const int32_t* table_starts;      // [num_seqs + 1], into block_tables
  const int32_t* block_tables;      // the tables of all sequences, concatenated; those of other groups follow
  const int64_t* logits_rows;       // [num_logits], ascending
  const int64_t* path_starts;       // [num_rows + 1], into path_slots; null: no row is in a tree
  const int64_t* path_slots;        // for each row in a tree, the slots of the last keys that it sees, its own last;
                                    // those of other groups follow
  const void* features;             // [num_rows, hidden] of the decoder's type, for a drafter head; otherwise null
  const OutriderLayerAdapter* const* adapters;  // [num_rows], each the adapter's layers, or null; null: no row has one
  const int32_t* group_of;          // [num_layers]: the group of each layer; null: all layers are in the first one
};

// ---- paged_attention.cpp

struct OutriderAttention {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;        // a multiple of 16
  int64_t latent_dim;      // a multiple of 16. Above 0: latent attention, whose keys begin with their values (latents)
  int64_t sliding_window;  // 0: none
  float scaling;
  float softcap;  // 0: none
  const float* sinks;  // [num_heads]: the score of one more key of each head, which has no value; null: none
};

// Computes attention. query and output: [num_rows, num_heads, head_dim]; query_stride is the distance of two query rows
// in elements. The caches are one layer's, in panels of 16 slots (kv_panels.h). With latent attention the output has
// latent_dim instead of head_dim, as have the values, and key_cache has the other head_dim - latent_dim of each key.
OUTRIDER_API OutriderStatus outrider_paged_attention(OutriderTeam* team, OutriderWorkspace* workspace, int32_t type,
                                                     const OutriderAttention* options, const OutriderBatch* batch,
                                                     const void* query, int64_t query_stride, const void* key_cache,
                                                     const void* value_cache, void* output);

// ---- delta_rule.cpp: linear attention by the gated delta rule

// A layer. Its stored rows consist of channels, before the convolution over tokens (queries and keys [num_key_heads,
// key_dim], then values [num_value_heads, value_dim]), and of two numbers for each value head: first all that become
// beta, then all that become the decay.
struct OutriderDeltaRule {
  int64_t num_key_heads;
  int64_t num_value_heads;   // a multiple of num_key_heads
  int64_t key_dim;           // a multiple of 16
  int64_t value_dim;         // same
  int64_t kernel_size;       // of the convolution; at most OUTRIDER_MAX_KERNEL
  const float* convolution;  // [kernel_size, channels]
  const float* decay;        // [num_value_heads]
  const float* time_bias;    // [num_value_heads]
  const float* norm;         // [value_dim]
  float epsilon;
  float beta_scale;
};

enum OutriderDeltaLimits : int32_t { OUTRIDER_MAX_KERNEL = 8 };

// The states that a step begins with and those that it writes. A state at a position is that after so many tokens.
struct OutriderStateSteps {
  const int64_t* positions;     // [num_seqs]; 0: zeros
  const int64_t* slots;         // [num_seqs]
  const int64_t* store_starts;  // [num_seqs + 1], into stores
  const int64_t* stores;        // [stores, 2]: position and slot, ascending by position
};

// Computes the rows of a batch from the states and the rows of a layer's cache, which has the batch's own already. rows:
// [slots, channels + 2 * num_value_heads] and gates and y: [num_rows, num_value_heads, value_dim] of `type`; states:
// [slots, num_value_heads, key_dim, value_dim].
OUTRIDER_API OutriderStatus outrider_delta_rule(OutriderTeam* team, OutriderWorkspace* workspace, int32_t type,
                                                const OutriderDeltaRule* rule, const OutriderBatch* batch,
                                                const OutriderStateSteps* steps, const void* rows, float* states,
                                                const void* gates, void* y);

// ---- kv_panels.cpp: reads and writes keys or values of some slots of the cache

struct OutriderPanels {
  void* panels;          // of the first layer
  int64_t num_layers;
  int64_t layer_size;    // elements from one layer to the next
  int64_t num_kv_heads;  // in the cache
  int64_t head_dim;      // a multiple of 16
  int32_t type;          // OutriderType
  int32_t are_values;    // 1: values, 0: keys
};

// rows: [num_layers, num_slots, num_heads, head_dim], at any address.
OUTRIDER_API void outrider_write_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads,
                                      const int64_t* slots, int64_t num_slots, const void* rows);
OUTRIDER_API void outrider_read_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads,
                                     const int64_t* slots, int64_t num_slots, void* rows);

// ---- decoder.cpp: all layers of a decoder, in one call. For its options, see ../decoder_options.py.

struct OutriderLayer {
  const float* input_norm;             // [hidden] or null
  const float* attention_output_norm;  // [hidden] or null: a norm of what attention adds to the residual stream
  const float* mlp_norm;               // [hidden] or null
  const float* mlp_output_norm;        // [hidden] or null: a norm of what the MLP adds to the residual stream
  const float* query_norm;             // [head_dim], or [num_heads * head_dim] if norms_all_heads, or null
  const float* key_norm;               // same, with num_kv_heads
  const float* cosines;                // [max_positions, rotary_dim / 2]; null: the layer does not rotate
  const float* sines;
  OutriderMatrix qkv;                // query heads, then key heads, then value heads
  OutriderMatrix value;              // value heads if `qkv` does not have them; otherwise `packed` is null
  OutriderMatrix output;
  OutriderMatrix gate_up;  // interleaved
  OutriderMatrix down;
  int64_t sliding_window;  // 0: none
};

struct OutriderDecoder {
  int64_t num_layers;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // the first dimensions of each head, which are rotated
  int64_t vocab_size;
  float scaling;
  float epsilon;
  float attention_softcap;     // 0: none
  float logits_softcap;        // 0: none
  float logits_scale;          // multiplies logits
  float embedding_scale;       // multiplies embeddings
  float residual_scale;        // multiplies what is added to the residual stream
  int32_t is_gelu;             // 1: the MLP's activation is the tanh approximation of GELU; 0: SiLU
  int32_t rounds_norms_once;   // see outrider_rms_norm
  int32_t norms_all_heads;     // 1: query and key norms are of all heads as one vector; 0: of each head
  int32_t type;                // OutriderType of activations, keys and values
  const void* embedding;  // [vocab_size, hidden] of `type`; null: `head` is also the embedding
  const float* final_norm;
  OutriderMatrix head;
  const OutriderLayer* layers;
  // For drafter heads (EAGLE-3), otherwise null and 0. The input of a head's first layer is a row's normalised
  // embedding, then its normalised feature; the residual stream begins with the feature.
  const float* feature_norm;  // [hidden]
  int32_t begins_normalised;  // 1: the residual stream begins with the normalised feature
  int32_t keeps_normalised;   // 1: the hidden states that are returned are those after the final norm
};

// The reduction of each row's hidden states to a feature for a drafter head (../../features.py): the residual stream
// after some layers ("taps", also known as auxiliary hidden states) in the decoder's type, normalised if there are
// norms, and multiplied by a matrix if there is one.
struct OutriderFeatures {
  int64_t num_taps;
  const int64_t* taps;        // [num_taps]: the number of layers before each tap, 0 to num_layers
  int32_t takes_final_norm;   // 1: a tap after the last layer is taken after the decoder's final norm
  float epsilon;              // of the norms below
  const float* tap_norms;     // [num_taps, hidden] or null: norms of single taps
  const float* norm;          // [num_taps * hidden] or null: a norm of all taps as one vector
  OutriderMatrix projection;  // of the decoder's type; if `packed` is null, taps are stored unchanged
  void* plane;                // [num_slots, width] of the decoder's type
};

// Computes layers [first, last) for the rows of `batch`, beginning with the tokens' embeddings if
// first is 0, otherwise with the state that the last call left in the workspace. key_caches and
// value_caches have an entry for every layer, each in panels of 16 slots (kv_panels.h). The last
// layer also writes the rows' features to their slots in the plane of `features`, unless it is null.
OUTRIDER_API OutriderStatus outrider_decoder_layers(OutriderTeam* team, OutriderWorkspace* workspace,
                                                    const OutriderDecoder* decoder, const OutriderBatch* batch,
                                                    void* const* key_caches, void* const* value_caches,
                                                    const OutriderFeatures* features, int64_t first, int64_t last);

// The states of rows between two layers, which one stage of a pipeline passes to the next: the residual stream of all rows
// in float32, then their `num_taps` taps. Returns the bytes of one row.
OUTRIDER_API int64_t outrider_state_size(const OutriderDecoder* decoder, int64_t num_taps);

// Puts states [num_rows, state size] into the workspace, for outrider_decoder_layers to continue with a layer `first` > 0.
OUTRIDER_API OutriderStatus outrider_load_states(OutriderWorkspace* workspace, const OutriderDecoder* decoder,
                                                 int64_t num_rows, int64_t num_taps, const void* states);

// Copies the states that outrider_decoder_layers left in the workspace after a layer other than the last.
OUTRIDER_API void outrider_save_states(const OutriderWorkspace* workspace, const OutriderDecoder* decoder,
                                       int64_t num_rows, int64_t num_taps, void* states);

// Computes the logits [num_logits, num_columns] of the given rows [num_logits] after the last layer; does nothing for 0
// rows. `columns` [decoder->vocab_size]: the column of each logit, while other columns are -infinity; null: logits are
// in order. `states` [num_logits, hidden] of the decoder's type, or null: receives the hidden states of these rows.
OUTRIDER_API OutriderStatus outrider_decoder_logits(OutriderTeam* team, OutriderWorkspace* workspace,
                                                    const OutriderDecoder* decoder, const int64_t* rows,
                                                    int64_t num_logits, float* logits, const int64_t* columns,
                                                    int64_t num_columns, void* states);

// ---- turns.cpp: turns of processes that compute on the same processors. `turns` is memory that the processes share,
// initially zeros, of outrider_turns_size() bytes and aligned to 64. Each process has its own slot, below
// outrider_turns_slots(). Times are in nanoseconds.
OUTRIDER_API int64_t outrider_turns_size(void);
OUTRIDER_API int32_t outrider_turns_slots(void);

// Queues for the turn. Returns 0 after `timeout` (still in the queue), 1 with the turn, or 2 with the turn of a holder
// whose lease had expired.
OUTRIDER_API int32_t outrider_turns_take(void* turns, int32_t slot, int64_t lease, int64_t timeout);

// Renews the lease: `lease` nanoseconds from now. Returns 0 if the turn was lost.
OUTRIDER_API int32_t outrider_turns_keep(void* turns, int32_t slot, int64_t lease);

// Returns 1 if others are in the queue.
OUTRIDER_API int32_t outrider_turns_is_wanted(void* turns, int32_t slot);

// Releases the turn to the longest waiter, which has `lease` nanoseconds to wake up and renew it; leaves the queue.
OUTRIDER_API void outrider_turns_give(void* turns, int32_t slot, int64_t lease);

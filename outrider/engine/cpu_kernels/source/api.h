// What Python calls: a plain C interface, so that the library is built without torch and
// serves any version of it. Pointers are to memory of the caller; shapes are row-major and
// contiguous unless a stride is given. Sizes and dtypes are checked by the caller
// (../operators.py); nothing here throws, allocates for longer than a call (but for teams,
// workspaces and samplers, which have their own free function and are null where there is no
// memory), or keeps state of its own. ../interface.py reads both headers, and says what it understands.
#pragma once

#include <stdint.h>

#define OUTRIDER_API extern "C" __attribute__((visibility("default")))

enum OutriderType : int32_t { OUTRIDER_FLOAT32 = 0, OUTRIDER_BFLOAT16 = 1, OUTRIDER_INT8 = 2 };

struct OutriderTeam;       // threads
struct OutriderWorkspace;  // scratch of one runner, grown to its largest step

// 0 or an errno: ENOMEM where scratch memory cannot be had, and then nothing was computed. Python raises it.
typedef int32_t OutriderStatus;

OUTRIDER_API const char* outrider_path(void);  // "portable", "avx512", "avx512_bf16" or "amx"

// Asks the system for what the path needs (AMX tiles are switched on for each process).
// Returns 0, or an errno.
OUTRIDER_API int32_t outrider_prepare_process(void);

OUTRIDER_API OutriderTeam* outrider_team_create(int32_t num_threads);
OUTRIDER_API void outrider_team_free(OutriderTeam* team);
OUTRIDER_API OutriderWorkspace* outrider_workspace_create(void);
OUTRIDER_API void outrider_workspace_free(OutriderWorkspace* workspace);

// What a decoder's step spends its time on.
enum OutriderPhase : int32_t {
  OUTRIDER_LINEAR = 0,
  OUTRIDER_ATTENTION = 1,
  OUTRIDER_NORM = 2,
  OUTRIDER_ROPE = 3,  // with the writes to the cache
  OUTRIDER_HEAD = 4,  // the output layer, with the norm before it
  OUTRIDER_NUM_PHASES = 5
};

// Measures the decoder steps of this workspace from here on, or no longer.
OUTRIDER_API void outrider_workspace_measure(OutriderWorkspace* workspace, int32_t is_on);

// Nanoseconds by OutriderPhase since the last call. spent [OUTRIDER_NUM_PHASES].
OUTRIDER_API void outrider_workspace_take_times(OutriderWorkspace* workspace, int64_t* spent);

// ---- linear.cpp

// W of y = x W^T + b, packed: see linear.h for the layout.
struct OutriderMatrix {
  const void* packed;
  const float* bias;    // [out_features] or null
  const float* scales;  // [out_features], of INT8 only
  int64_t out_features;
  int64_t in_features;
  int32_t type;  // OutriderType
};

// Bytes that the packed form takes.
OUTRIDER_API int64_t outrider_packed_size(int32_t type, int64_t out_features, int64_t in_features);

// Packs rows [first, first + num) of a weight [out_features, in_features] given as `from`
// [num, in_features]; several calls fill one matrix, for projections that are computed
// together. `interleave` 1: gate and up halves of out_features alternate by panels, as the
// decoder multiplies them. For INT8 `from` is already quantised.
OUTRIDER_API OutriderStatus outrider_pack(OutriderTeam* team, int32_t type, const void* from, int64_t first,
                                          int64_t num, int64_t out_features, int64_t in_features, int32_t interleave,
                                          void* packed);

// One row of the packed weight, for embeddings that are tied to the output layer.
OUTRIDER_API OutriderStatus outrider_unpack_row(const OutriderMatrix* matrix, int64_t row, float* to);

// y = x W^T + b, with x [num_rows, in_features] and y of `type` of the activations (FLOAT32 or BFLOAT16).
OUTRIDER_API OutriderStatus outrider_linear(OutriderTeam* team, OutriderWorkspace* workspace, int32_t activation_type,
                                            const void* x, int64_t num_rows, const OutriderMatrix* matrix, void* y);

// ---- rms_norm.cpp: y = x / sqrt(mean(x^2) + epsilon) * weight, row by row; weight is float32.
OUTRIDER_API OutriderStatus outrider_rms_norm(OutriderTeam* team, int32_t type, const void* x, int64_t num_rows,
                                              int64_t width, const float* weight, float epsilon, void* y);

// ---- the rows of one step (see input_batch.py)

struct OutriderBatch {
  int64_t num_rows;
  int64_t num_logits;               // rows whose logits are wanted: of others the last layer makes keys and values only
  int64_t num_seqs;
  int64_t block_size;
  const int64_t* token_ids;         // [num_rows]
  const int64_t* positions;         // [num_rows]
  const int64_t* slots;             // [num_rows]
  const int32_t* query_start_loc;   // [num_seqs + 1]
  const int32_t* seq_lens;          // [num_seqs]
  const int32_t* table_starts;      // [num_seqs + 1], into block_tables
  const int32_t* block_tables;      // of all sequences, end to end
  const int64_t* logits_rows;       // [num_logits], rising
  const int64_t* path_starts;       // [num_rows + 1], into path_slots; null: no row is in a tree
  const int64_t* path_slots;        // of a row in a tree: the slots of the last keys that it sees, its own last
  const void* features;             // [num_rows, hidden] of the decoder's type; of a drafter head alone
};

// ---- paged_attention.cpp

struct OutriderAttention {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;        // a multiple of 16
  int64_t sliding_window;  // 0: none
  float scaling;
  float softcap;  // 0: none
};

// query and output [num_rows, num_heads, head_dim]; query rows at query_stride elements. The caches are those of one
// layer, in panels of 16 slots (kv_panels.h).
OUTRIDER_API OutriderStatus outrider_paged_attention(OutriderTeam* team, OutriderWorkspace* workspace, int32_t type,
                                                     const OutriderAttention* options, const OutriderBatch* batch,
                                                     const void* query, int64_t query_stride, const void* key_cache,
                                                     const void* value_cache, void* output);

// ---- kv_panels.cpp: keys or values of some slots, out of the cache and into it

struct OutriderPanels {
  void* panels;          // of the first of these layers
  int64_t num_layers;
  int64_t layer_size;    // elements from one layer to the next
  int64_t num_kv_heads;  // of the cache
  int64_t head_dim;      // a multiple of 16
  int32_t type;          // OutriderType
  int32_t are_values;    // or keys
};

// rows [num_layers, num_slots, num_heads, head_dim], at any address.
OUTRIDER_API void outrider_write_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads,
                                      const int64_t* slots, int64_t num_slots, const void* rows);
OUTRIDER_API void outrider_read_rows(const OutriderPanels* cache, int64_t first_head, int64_t num_heads,
                                     const int64_t* slots, int64_t num_slots, void* rows);

// ---- decoder.cpp: all layers of a Llama-shaped decoder in one call

struct OutriderLayer {
  const float* input_norm;           // [hidden]
  const float* post_attention_norm;  // [hidden]
  const float* query_norm;           // [head_dim] or null
  const float* key_norm;             // [head_dim] or null
  OutriderMatrix qkv;                // query, key and value heads, one after the other
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
  int64_t vocab_size;
  float scaling;
  float epsilon;
  int32_t type;          // of activations, keys and values
  const float* cosines;  // [max_positions, head_dim / 2]
  const float* sines;
  const void* embedding;  // [vocab_size, hidden] of `type`, or null: the rows of `head`
  const float* final_norm;
  OutriderMatrix head;
  const OutriderLayer* layers;
  // Of a drafter head (EAGLE-3), else null and 0. Its first layer attends with the embedding and the feature of a row,
  // each normalised, one after the other; its residual stream begins with the feature.
  const float* feature_norm;  // [hidden]
  int32_t begins_normalised;  // the residual stream, with the feature as it is normalised
  int32_t keeps_normalised;   // what is kept of a row as its own hidden state: behind the final norm
};

// What is kept of each row for a drafter head (../../features.py): the residual stream after some layers ("taps"),
// in the decoder's type, normalised where there are norms, and multiplied by a matrix.
struct OutriderFeatures {
  int64_t num_taps;
  const int64_t* taps;        // [num_taps]: numbers of layers, 0 … num_layers
  int32_t takes_final_norm;   // a tap after the last layer is read behind the decoder's final norm
  float epsilon;              // of the norms below
  const float* tap_norms;     // [num_taps, hidden] or null: of each tap by itself
  const float* norm;          // [num_taps * hidden] or null: of all of them, as one vector
  OutriderMatrix projection;  // of the decoder's type; without `packed`: taps are kept as they are
  void* plane;                // [num_slots, width] of the decoder's type
};

// Layers [first, last) for the rows of `batch`; first 0 starts from the tokens' embeddings,
// otherwise from what the last call left in the workspace. key_caches and value_caches are
// those of all layers, each in panels of 16 slots (kv_panels.h). With `features`, those of the rows
// are at their slots of its plane after the last layer; null: none are made.
OUTRIDER_API OutriderStatus outrider_decoder_layers(OutriderTeam* team, OutriderWorkspace* workspace,
                                                    const OutriderDecoder* decoder, const OutriderBatch* batch,
                                                    void* const* key_caches, void* const* value_caches,
                                                    const OutriderFeatures* features, int64_t first, int64_t last);

// Logits [num_logits, vocab_size] of the given rows [num_logits] after the last layer; for none of them nothing is
// done. With `columns` [decoder->vocab_size], each logit goes to that one of num_columns, and the others are
// -infinity. `states` [num_logits, hidden] of the decoder's type or null: hidden states of these rows.
OUTRIDER_API OutriderStatus outrider_decoder_logits(OutriderTeam* team, OutriderWorkspace* workspace,
                                                    const OutriderDecoder* decoder, const int64_t* rows,
                                                    int64_t num_logits, float* logits, const int64_t* columns,
                                                    int64_t num_columns, void* states);

// ---- turns.cpp: turns of processes that compute on the same processors. `turns` is memory that they share, zeros
// at first, of outrider_turns_size() bytes and aligned to 64; each has a slot of its own, below outrider_turns_slots().
// Times are in nanoseconds.
OUTRIDER_API int64_t outrider_turns_size(void);
OUTRIDER_API int32_t outrider_turns_slots(void);

// Waits for the turn, in line. Returns 0 after `timeout` (and still stands in line), 1 with the turn, 2 with the turn
// that was taken from a holder whose lease had run out.
OUTRIDER_API int32_t outrider_turns_take(void* turns, int32_t slot, int64_t lease, int64_t timeout);

// Leases the turn for so long from now on. Returns 0 when it is another's by now.
OUTRIDER_API int32_t outrider_turns_keep(void* turns, int32_t slot, int64_t lease);

// Returns 1 when others stand in line.
OUTRIDER_API int32_t outrider_turns_is_wanted(void* turns, int32_t slot);

// Hands the turn to the next, who has `lease` to wake up and take it, and leaves the line.
OUTRIDER_API void outrider_turns_give(void* turns, int32_t slot, int64_t lease);

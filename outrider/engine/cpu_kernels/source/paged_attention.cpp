#include "paged_attention.h"

#include "call.h"

using namespace outrider;

namespace {

template <class KV, bool Latent>
void attend(Team& team, OutriderWorkspace& workspace, const OutriderAttention& options, const OutriderBatch& batch,
            const KV* query, int64_t query_stride, const KV* keys, const KV* values, KV* output) {
  AttentionPlan plan;
  plan.make(options, batch, team.size());
  if (plan.is_split)
    workspace.partials.of<float>(plan.num_partials * options.num_kv_heads *
                                 PartialResult::size(plan.query_rows, options.head_dim));
  workspace.own.resize(std::max<size_t>(workspace.own.size(), team.size()));
  const PagedAttention<KV, Latent> attention{options, batch, plan, query, query_stride, keys, values,
                                             workspace.partials.get<float>()};
  const auto store_row = [&](int64_t row, int64_t head, const float* from, float factor) {
    const int64_t width = attention.value_width();
    KV* to = output + (row * options.num_heads + head) * width;
    for (int64_t d = 0; d < width; d += kWidth) store_rounded(to + d, finished_values(from + d, factor));
  };
  const int64_t scratch_bytes = AttentionScratch<KV>::bytes(plan.query_rows, options.head_dim);
  for (auto& own : workspace.own) own.attention.of<char>(scratch_bytes);
  team.share(attention.num_tasks(), [&](int64_t task, int member) {
    AttentionScratch<KV> scratch(workspace.own[member].attention.get<char>(), plan.query_rows, options.head_dim);
    attention.run(task, scratch, store_row);
  });
  if (plan.is_split)
    team.share(attention.num_merges(), [&](int64_t task, int) { attention.finish_split(task, store_row); });
}

}  // namespace

OutriderStatus outrider_paged_attention(OutriderTeam* team, OutriderWorkspace* workspace, int32_t type,
                                        const OutriderAttention* options, const OutriderBatch* batch, const void* query,
                                        int64_t query_stride, const void* key_cache, const void* value_cache,
                                        void* output) {
  return call([&] {
    Team& threads = *reinterpret_cast<Team*>(team);
    const auto attend_in = [&]<class KV>(const KV* rows) {
      const auto compute = options->latent_dim > 0 ? attend<KV, true> : attend<KV, false>;
      compute(threads, *workspace, *options, *batch, rows, query_stride, static_cast<const KV*>(key_cache),
              static_cast<const KV*>(value_cache), static_cast<KV*>(output));
    };
    if (type == OUTRIDER_BFLOAT16) attend_in(static_cast<const BFloat16*>(query));
    else attend_in(static_cast<const float*>(query));
  });
}

// Every scenario on ranks that are threads, one test case each.
#include <map>

#include "tests/catch.h"
#include "tests/rank_device.h"
#include "tests/scenarios/scenario.h"

using namespace sherd::scenarios;

namespace {

void run_on_threads(const std::string& id) {
  for (const Scenario& s : all_scenarios()) {
    if (s.id != id) continue;
    if (sherd::test::skip_if(!s.not_here.empty(), s.not_here)) return;
    for (const int world : s.worlds) {
      const std::vector<Outcome> outcomes = run(s, {Harness::threads, world, world});
      for (std::size_t i = 0; i < outcomes.size(); ++i) {
        INFO(world << " ranks, " << s.text(static_cast<int>(i)));
        CHECK(outcomes[i].error == "");
      }
    }
    return;
  }
  FAIL("no scenario is called " << id);
}

}  // namespace

TEST_CASE("every scenario computes on the device that SHERD_TEST_DEVICE names", "[.device]") {
  const std::string not_here = sherd::test::why_not_here(compute_name(), 2);
  if (sherd::test::skip_if(!not_here.empty(), not_here)) return;
  for (const Scenario& s : all_scenarios())
    if (s.not_here.empty()) run_on_threads(s.id);
}

TEST_CASE("the grids are the catalogue's") {
  std::map<std::string, int> combinations;  // by the catalogue's first number
  for (const Scenario& s : all_scenarios()) {
    print_owed(s);
    combinations[s.id.substr(0, s.id.find('.'))] += s.combinations;
  }
  CHECK(combinations ==
        std::map<std::string, int>{{"S1", 8}, {"S2", 19}, {"S3", 26}, {"S4", 10}, {"S5", 348}});
}

TEST_CASE("S1.1 test_float16_cast_forward") { run_on_threads("S1.1"); }
TEST_CASE("S2.1 test_partial_flattening") { run_on_threads("S2.1"); }
TEST_CASE("S2.2 test_flatten_nothing") { run_on_threads("S2.2"); }
TEST_CASE("S2.3 test_empty_module") { run_on_threads("S2.3"); }
TEST_CASE("S2.4 test_numel_without_shared_params") { run_on_threads("S2.4"); }
TEST_CASE("S2.5 test_numel_with_shared_params") { run_on_threads("S2.5"); }
TEST_CASE("S2.6 test_output_without_shared_params") { run_on_threads("S2.6"); }
TEST_CASE("S2.7 test_output_with_shared_params") { run_on_threads("S2.7"); }
TEST_CASE("S2.8 test_pnorm_after_step_with_shared_params") { run_on_threads("S2.8"); }
TEST_CASE("S2.9 test_flat_param_shard_metadata_aligned_full_precision") { run_on_threads("S2.9"); }
TEST_CASE("S2.10 test_flat_param_shard_metadata_aligned_mixed_precision") { run_on_threads("S2.10"); }
TEST_CASE("S3.1 test_compute_dtype") { run_on_threads("S3.1"); }
TEST_CASE("S3.2a test_reduce_dtype (fp32 reduce)") { run_on_threads("S3.2a"); }
TEST_CASE("S3.2b test_reduce_dtype (bf16 reduce)") { run_on_threads("S3.2b"); }
TEST_CASE("S3.3 test_grad_acc_with_reduce_dtype") { run_on_threads("S3.3"); }
TEST_CASE("S3.4 test_float16_on_one_submodule") { run_on_threads("S3.4"); }
TEST_CASE("S3.5 test_submodules_with_external_inputs") { run_on_threads("S3.5"); }
TEST_CASE("S3.6 test_norm_modules_bf16") { run_on_threads("S3.6"); }
TEST_CASE("S3.7 test_norm_modules_fp16") { run_on_threads("S3.7"); }
TEST_CASE("S4.1 test_disable_compiling_hooks") { run_on_threads("S4.1"); }
TEST_CASE("S4.2 test_dynamo_trace_use_training_state") { run_on_threads("S4.2"); }
TEST_CASE("S4.3 test_trace_fsdp_set_") { run_on_threads("S4.3"); }
TEST_CASE("S4.4 test_simple_mlp_fullgraph_backend_aot_eager") { run_on_threads("S4.4"); }
TEST_CASE("S4.5 test_simple_mlp_fullgraph_backend_aot_eager_decomp_partition") { run_on_threads("S4.5"); }
TEST_CASE("S4.6 test_simple_mlp_fullgraph_backend_inductor") { run_on_threads("S4.6"); }
TEST_CASE("S4.7 test_transformer_fullgraph_backend_aot_eager") { run_on_threads("S4.7"); }
TEST_CASE("S4.8 test_transformer_fullgraph_backend_aot_eager_decomp_partition") { run_on_threads("S4.8"); }
TEST_CASE("S4.9 test_transformer_fullgraph_backend_inductor") { run_on_threads("S4.9"); }
TEST_CASE("S5.1 test_fsdp_compile") { run_on_threads("S5.1"); }
TEST_CASE("S5.2 test_diff_hyperparams (no_shard)") { run_on_threads("S5.2"); }
TEST_CASE("S5.3 test_diff_hyperparams (shard_grad_op)") { run_on_threads("S5.3"); }
TEST_CASE("S5.4 test_diff_hyperparams (full_shard)") { run_on_threads("S5.4"); }
TEST_CASE("S5.5 test_diff_hyperparams_cpu_offload (no_shard)") { run_on_threads("S5.5"); }
TEST_CASE("S5.6 test_diff_hyperparams_cpu_offload (shard_grad_op)") { run_on_threads("S5.6"); }
TEST_CASE("S5.7 test_diff_hyperparams_cpu_offload (full_shard)") { run_on_threads("S5.7"); }
TEST_CASE("S5.8 test_diff_trainability") { run_on_threads("S5.8"); }
TEST_CASE("S5.9 test_multiple_optimizers") { run_on_threads("S5.9"); }
TEST_CASE("S5.10 test_multiple_forward (offload false)") { run_on_threads("S5.10"); }
TEST_CASE("S5.11 test_multiple_forward (offload true)") { run_on_threads("S5.11"); }
TEST_CASE("S5.12 test_summon_between_two_forwards (offload false)") { run_on_threads("S5.12"); }
TEST_CASE("S5.13 test_summon_between_two_forwards (offload true)") { run_on_threads("S5.13"); }
TEST_CASE("S5.14 test_access_params_after_forward") { run_on_threads("S5.14"); }
TEST_CASE("S5.15 test_param_writeback") { run_on_threads("S5.15"); }
TEST_CASE("S5.16 test_grad_writeback") { run_on_threads("S5.16"); }
TEST_CASE("S5.17 test_writeback_shape_mismatch") { run_on_threads("S5.17"); }
TEST_CASE("S5.18 test_writeback_between_fwd_and_bwd_for_no_reshard_raises") { run_on_threads("S5.18"); }
TEST_CASE("S5.19 test_no_reshard_and_mixed_precision") { run_on_threads("S5.19"); }
TEST_CASE("S5.20 test_named_parameters_in_forward") { run_on_threads("S5.20"); }
TEST_CASE("S5.21 test_no_sync_correctness") { run_on_threads("S5.21"); }
TEST_CASE("S5.22 test_no_sync_mixed_precision") { run_on_threads("S5.22"); }
TEST_CASE("S5.23 test_non_uniform_requires_grad") { run_on_threads("S5.23"); }
TEST_CASE("S5.24 test_multi_tensor_apply_size0_tensors_cpu") { run_on_threads("S5.24"); }
TEST_CASE("S5.25 test_multi_tensor_apply_size0_tensors_cuda") { run_on_threads("S5.25"); }

// Every scenario on ranks that are threads, one test case each.
#include <iostream>
#include <map>

#include "tests/catch.h"
#include "tests/scenarios/scenario.h"

using namespace sherd::scenarios;

namespace {

void run_on_threads(const std::string& id) {
  for (const Scenario& s : all_scenarios()) {
    if (s.id != id) continue;
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

TEST_CASE("the grids are the catalogue's") {
  std::map<std::string, int> combinations;  // by the catalogue's first number
  for (const Scenario& s : all_scenarios()) {
    std::cout << "scenario-owes: " << s.id << " | " << s.combinations << " | " << owed(s) << std::endl;
    combinations[s.id.substr(0, s.id.find('.'))] += s.combinations;
  }
  CHECK(combinations == std::map<std::string, int>{{"S1", 8}, {"S2", 19}, {"S3", 26}});
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

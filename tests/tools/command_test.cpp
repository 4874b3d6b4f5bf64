// The program itself, from its command line to its exit code.
#include "tests/tools/command.h"

#include <algorithm>
#include <csignal>
#include <deque>
#include <sstream>

#include "runtime/error.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

const Arguments train = {"train", "--data",    "text", "--layers",  "1", "--heads",
                         "1",     "--width",   "8",    "--context", "8", "--batch",
                         "2",     "--dropout", "0.1",  "--threads", "1"};

}  // namespace

TEST_CASE("the program trains, samples, and ends with its figures") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  Command run(folder, with(train, {"--steps", "5"}));
  CHECK(run.wait() == 0);
  INFO(run.err());
  const std::string out = run.out();
  const std::string last = out.substr(out.rfind('\n', out.size() - 2) + 1);
  CHECK_THAT(last, Catch::Matchers::Matches(
                       "final: step=5 loss=[0-9.]+ val_loss=[0-9.]+ bigram=[0-9.]+ tokens_per_s=[0-9]+\n"));
  CHECK(out.find('\r') == std::string::npos);

  Command sample(folder,
                 {"sample", "--checkpoint", "runs/1", "--prompt", "line", "--tokens", "7", "--seed", "3"});
  CHECK(sample.wait() == 0);
  CHECK(sample.out().size() == 4 + 7 + 1);
  CHECK(sample.out().starts_with("line"));
}

TEST_CASE("a run without a name gets the next number, and resuming takes the newest") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  for (int i = 0; i < 2; ++i) CHECK(Command(folder, with(train, {"--steps", "2"})).wait() == 0);
  CHECK(Command(folder, {"train", "--resume", "--steps", "3"}).wait() == 0);
  CHECK(tools::saved_steps(folder / "runs/1", posix_file_system()).back() == 2);
  CHECK(tools::saved_steps(folder / "runs/2", posix_file_system()).back() == 3);
}

TEST_CASE("runs without a name that start at once get a number each") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments = with(train, {"--steps", "3"});
  CHECK(Command(folder, with(arguments, {"--out", "alone"})).wait() == 0);
  std::deque<Command> runs;
  for (int i = 0; i < 5; ++i) runs.emplace_back(folder, arguments);
  for (Command& run : runs) {
    CHECK(run.wait() == 0);
    INFO(run.err());
  }
  for (int i = 1; i <= 5; ++i)
    CHECK(contents(folder / "runs" / std::to_string(i)) == contents(folder / "alone"));
  // The newest has the highest number, whatever went before.
  std::filesystem::remove_all(folder / "runs/2");
  std::filesystem::create_directory(folder / "runs/07");
  CHECK(Command(folder, arguments).wait() == 0);
  CHECK(contents(folder / "runs/6") == contents(folder / "alone"));
  Command again(folder, {"train", "--resume"});
  CHECK(again.wait() == 0);
  CHECK_THAT(again.out(), ContainsSubstring("run runs/6:"));
}

TEST_CASE("killed at any moment and resumed, the program ends at the same bits") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments = with(train, {"--steps", "300", "--eval-every", "20", "--out"});
  CHECK(Command(folder, with(arguments, {"whole"})).wait() == 0);
  for (const int steps : {1, 40, 160}) {
    const std::string out = "killed-" + std::to_string(steps);
    Command run(folder, with(arguments, {out}));
    REQUIRE(run.prints("step " + std::to_string(steps)));
    run.signal(SIGKILL);
    run.wait();
    Command again(folder, {"train", "--resume", "--out", out});
    CHECK(again.wait() == 0);
    INFO(again.err());
    CHECK(contents(folder / out) == contents(folder / "whole"));
  }
}

TEST_CASE("Ctrl-C saves and ends well; going on ends at the same bits") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments = with(train, {"--steps", "3000", "--eval-every", "1000", "--out"});
  CHECK(Command(folder, with(arguments, {"whole"})).wait() == 0);
  Command run(folder, with(arguments, {"stopped"}));
  REQUIRE(run.prints("step 1/"));
  run.signal(SIGINT);
  CHECK(run.wait() == 0);
  CHECK_THAT(run.out(), ContainsSubstring("stopped after step "));
  CHECK(tools::saved_steps(folder / "stopped", posix_file_system()).back() > 0);
  CHECK(Command(folder, {"train", "--resume", "--out", "stopped"}).wait() == 0);
  const auto stopped = contents(folder / "stopped"), whole = contents(folder / "whole");
  for (const std::string name :
       {"metrics.jsonl", "step-3000/model.safetensors", "step-3000/optimizer.safetensors"}) {
    CHECK(stopped.at(name) == whole.at(name));
  }
}

TEST_CASE("signals that come together are one request to stop, and a later one ends the run at once") {
  const TempDirectory folder;
  write_file(folder / "text", small_text(20000));
  Command run(folder, with(train, {"--steps", "4000000", "--eval-every", "4000000", "--out", "together"}));
  REQUIRE(run.prints("step 1/"));
  for (const int signal : {SIGTERM, SIGTERM, SIGINT, SIGHUP, SIGTERM}) run.signal(signal);
  CHECK(run.wait() == 0);
  CHECK_THAT(run.out(), ContainsSubstring("stopped after step "));
  // Its first step takes longer than anybody who asks twice waits.
  Command slow(folder, {"train", "--data", "text", "--layers", "8", "--heads", "8", "--width", "512",
                        "--context", "256", "--batch", "64", "--threads", "1", "--out", "slow"});
  REQUIRE(slow.prints("run slow:"));
  insist(slow, SIGTERM);
  CHECK(slow.wait() == 128 + SIGTERM);
  CHECK(tools::saved_steps(folder / "slow", posix_file_system()) == std::vector<std::int64_t>{0});
}

TEST_CASE("the program trains on ranks and shows how the model lies on them", "[threads meet]") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  Command run(folder, with(train, {"--steps", "5", "--ranks", "2", "--layout", "flat"}));
  CHECK(run.wait() == 0);
  INFO(run.err());
  CHECK_THAT(run.out(), ContainsSubstring("final: step=5 "));
  Command inspect(folder,
                  {"inspect", "--model", "gpt", "--layers", "1", "--ranks", "2", "--svg", "shards.svg"});
  CHECK(inspect.wait() == 0);
  CHECK_THAT(inspect.out(), ContainsSubstring("per-parameter layout, 2 groups, 2 ranks"));
  CHECK_THAT(inspect.out(), ContainsSubstring("drawn in shards.svg"));
  CHECK(posix_file_system().read(folder / "shards.svg").starts_with("<svg "));
}

TEST_CASE("Ctrl-C ends all ranks at one step", "[threads meet]") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const Arguments arguments =
      with(train, {"--ranks", "2", "--steps", "3000", "--eval-every", "1000", "--out"});
  CHECK(Command(folder, with(arguments, {"whole"})).wait() == 0);
  Command run(folder, with(arguments, {"stopped"}));
  REQUIRE(run.prints("step 1/"));
  run.signal(SIGINT);
  CHECK(run.wait() == 0);
  CHECK_THAT(run.out(), ContainsSubstring("stopped after step "));
  CHECK(Command(folder, {"train", "--resume", "--out", "stopped"}).wait() == 0);
  auto stopped = contents(folder / "stopped"), whole = contents(folder / "whole");
  REQUIRE(whole.contains("step-3000/model.rank-1.safetensors"));
  for (auto* files :
       {&stopped, &whole})  // the steps before were saved at other moments, which config.json knows
    std::erase_if(*files, [](const auto& file) {
      return file.first.ends_with("config.json") ||
             (file.first.starts_with("step-") && !file.first.starts_with("step-3000/"));
    });
  CHECK(stopped == whole);
}

TEST_CASE("extreme numbers to draw by give text or one line") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(Command(folder, with(train, {"--steps", "2", "--out", "run"})).wait() == 0);
  const Arguments sample = {"sample", "--checkpoint", "run", "--tokens", "5"};
  Command greedy(folder, with(sample, {"--temperature", "0"}));
  REQUIRE(greedy.wait() == 0);
  for (const std::string number : {"1e-300", "4.9e-324", "1e-45", "1e-38", "-0", "1e-400", "-1e-400", "nan",
                                   "inf", "-inf", "1e309", "1e6", "1e7", "-1e-300"}) {
    INFO(number);
    Command run(folder, with(sample, {"--temperature=" + number}));
    const int code = run.wait();
    CHECK((code == 0 ? run.err() == "" : std::ranges::count(run.err(), '\n') == 1));
    CHECK((code == 0 ? !run.out().empty() : run.err().find("--temperature") != std::string::npos));
    if (code == 0 && number != "1e6") CHECK(run.out() == greedy.out());
  }
  for (const std::string number : {"256", "257", "1073741824", "1073741825", "9223372036854775807",
                                   "9223372036854775808", "18446744073709551617", "-1", "1e3"}) {
    INFO(number);
    Command run(folder, with(sample, {"--top-k=" + number}));
    CHECK((run.wait() == 0 ? run.err() == "" : std::ranges::count(run.err(), '\n') == 1));
  }
}

TEST_CASE("wrong command lines end in one line and the exit code 1") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const std::pair<Arguments, std::string> wrong[] = {
      {{}, "no command was written"},
      {{"dance"}, "'dance' is no command"},
      {{"train", "--no-such-flag"}, "--no-such-flag"},
      {{"train", "--steps", "many"}, "--steps"},
      {{"train", "--steps", "1.5"}, "--steps"},
      {{"train", "--steps", "99999999999999999999"}, "--steps"},
      {{"train", "--steps", ""}, "--steps"},
      {{"train", "--steps", " 5"}, "--steps"},
      {{"train", "--steps", "0x10"}, "--steps"},
      {{"train", "--steps", "18446744073709551617"}, "--steps"},
      {{"train", "--lr", ""}, "--lr"},
      {{"train", "--lr", "1e-3x"}, "--lr"},
      {{"train", "--seed", "18446744073709551616"}, "--seed"},
      {{"train", "--seed", ""}, "--seed"},
      {{"train", "--threads", "1000000000"}, "--threads 1000000000"},
      {{"train", "--layers", "1000000000"}, "--layers 1000000000"},
      {{"train", "--width", "1000000"}, "--width 1000000"},
      {{"train", "--batch", "1000000000"}, "--batch 1000000000"},
      {{"train", "--strategy", std::string(100'000, 'x')}, "--strategy xxx"},
      {{"train", "--steps", std::string(100'000, '1')}, "--steps '111"},
      {{"train", "--" + std::string(100'000, 'x')}, "--xxx"},
      {{"train", "--data", std::string(100'000, 'x')}, "File name too long"},
      {{"train", "--data", "two\nlines"}, "two lines"},
      {{"train", "--resume", "--out", "two\nlines"}, "two lines"},
      {{"launch", "-n", "", "true"}, "-n"},
      {{"inspect", "--layers", "1000000000"}, "--layers 1000000000"},
      {{"sample", "--checkpoint", "nowhere", "--tokens", "4294967296"}, "--tokens"},
      {{"sample", "--checkpoint", "nowhere", "--top-k", "4294967296"}, "--top-k"},
      {{"train", "--steps"}, "--steps"},
      {{"train", "--data", "text", "--seed", "-1"}, "--seed"},
      {{"sample", "--checkpoint", "nowhere", "--seed", "-1"}, "--seed"},
      {{"train", "--lr", "fast"}, "--lr"},
      {{"train", "--data", "nowhere"}, "nowhere"},
      {{"train", "--data", "text", "--context", "100000"}, "--context 100000"},
      {{"train", "--resume", "--out", "nowhere"}, "nowhere"},
      {{"train", "--data", "text", "--out", "/dev/full/run"}, "/dev/full"},
      {{"train", "--ranks", "two"}, "--ranks"},
      {{"train", "--data", "text", "--ranks", "3"}, "--ranks 3: does not divide --batch 16"},
      {{"train", "--data", "text", "--strategy", "fast"}, "--strategy fast"},
      {{"train", "--data", "text", "--layout"}, "--layout"},
      {{"inspect", "--ranks", "0"}, "--ranks 0"},
      {{"bench", "--steps", "0"}, "--steps 0"},
      {{"bench", "--against", "nowhere.json"}, "nowhere.json"},
      {{"bench", "--dtype", "int"}, "--param-dtype"},
      {{"inspect", "--layout", "round"}, "--layout round"},
      {{"inspect", "--model", "tree"}, "--model tree"},
      {{"inspect", "--svg", "nowhere/shards.svg"}, "nowhere"},
      {{"report"}, "RUN"},
      {{"report", "nowhere"}, "there is no folder 'nowhere'"},
      {{"report", "."}, "'.' holds no metrics.jsonl"},
      {{"sample"}, "--checkpoint"},
      {{"sample", "--checkpoint", "nowhere"}, "nowhere"},
      {{"sample", "--checkpoint", "nowhere", "--temperature", "-1"}, "--temperature"},
  };
  for (const auto& [arguments, part] : wrong) {
    Command run(folder, arguments);
    CHECK(run.wait() == 1);
    const std::string err = run.err();
    INFO(err);
    CHECK(err.starts_with("sherd: "));
    CHECK(std::ranges::count(err, '\n') == 1);
    CHECK(err.size() < 2200);
    CHECK_THAT(err, ContainsSubstring(part));
    CHECK(run.out().empty());
  }
}

TEST_CASE("a word out of place is named, with the rule and the way out") {
  const TempDirectory folder;
  struct Line {
    Arguments words;
    std::string written, way_out;
  };
  const Line lines[] = {
      {{}, "no command", "sherd train --data book.txt"},
      {{""}, "no command", "sherd train --data book.txt"},
      {{"predict"},
       "'predict'",
       "train, sample, generate, evaluate, inspect, bench, report, merge, split and launch"},
      {{"predict", "--help"}, "'predict'", "sherd --help"},
      {{"evaluate"}, "FOLDER is required", "sherd evaluate TinyLlama-1.1B --data book.txt"},
      {{"checkpoint"}, "'checkpoint'", "sherd --help"},
      {{"trian"}, "'trian'", "did you mean train?"},
      {{"Train"}, "'Train'", "did you mean train?"},
      {{"--train"}, "'--train'", "did you mean train?"},
      {{"help"}, "'help'", "did you mean --help?"},
      {{"version"}, "'version'", "did you mean --version?"},
      {{"--verison"}, "'--verison'", "did you mean --version?"},
      {{"-v"}, "'-v'", "sherd --help"},
      {{"--steps", "3", "train"}, "'--steps' is a flag of train and bench", "behind that word"},
      {{"--checkpoint", "x", "sample"}, "'--checkpoint'", "flag of sample"},
      {{"train", "--stpes", "3"}, "'--stpes'", "did you mean --steps?"},
      {{"train", "--stpes=3"}, "'--stpes=3'", "did you mean --steps?"},
      {{"train", "-steps", "3"}, "'-steps'", "did you mean --steps?"},
      {{"train", "--step", "3"}, "'--step'", "did you mean --steps?"},
      {{"train", "steps", "3"}, "'steps'", "did you mean --steps?"},
      {{"train", "--checkpoint", "x"}, "'--checkpoint'", "but of sample"},
      {{"train", "book.txt"}, "'book.txt'", "sherd train --data book.txt"},
      {{"train", "sample"}, "'sample'", "write the flag before it"},
      {{"train", "--", "--data", "x"}, "'--data' stands behind '--'", "leave '--' out"},
      {{"train", "--steps=3", "--", "--data=x"}, "'--data=x' stands behind '--'", "leave '--' out"},
      {{"sample", "--", "--checkpoint", "x"}, "'--checkpoint' stands behind '--'", "leave '--' out"},
      {{"train", "--", "--dta", "x"}, "'--dta'", "did you mean --data?"},
      {{"train", "--steps", "3", "4"}, "'4'", "write the flag before it"},
      {{"train", "--version"}, "'--version'", "sherd train --help"},
      {{"train", "--steps"}, "--steps stands without its value", "sherd train --help"},
      {{"train", "--data"}, "--data stands without its value", "sherd train --help"},
      {{"train", "--steps", "3", "--steps=4"}, "--steps stands there more than once", "sherd train --help"},
      {{"sample", "--chekpoint", "x"}, "'--chekpoint'", "did you mean --checkpoint?"},
      {{"sample", "runs/1"}, "'runs/1'", "sherd sample --checkpoint runs/1"},
      {{"sample"}, "--checkpoint is required", "sherd sample --checkpoint runs/1"},
      {{"inspect", "gpt"}, "'gpt'", "sherd inspect --help"},
      {{"bench", "--svg", "x"}, "'--svg'", "but of inspect"},
      {{"report", "--otu", "x"}, "'--otu'", "did you mean --out?"},
      {{"report"}, "RUN is required", "sherd report runs/1"},
      {{"launch"}, "-n is required", "sherd launch -n 4 PROGRAM"},
      {{"launch", "true", "-n", "2"},
       "-n is required before the program 'true'",
       "sherd launch -n 4 PROGRAM"},
      {{"launch", "-n", "2", "--hsots", "a", "true"}, "'--hsots'", "did you mean --hosts?"},
      {{"launch", "-n", "2", "--hsots=a", "--", "true"}, "'--hsots=a'", "did you mean --hosts?"},
      {{"launch", "--np", "2", "true"}, "'--np'", "sherd launch -n 4 PROGRAM"},
      {{"launch-rank"},
       "'launch-rank'",
       "train, sample, generate, evaluate, inspect, bench, report, merge, split and launch"},
  };
  for (const Line& line : lines) {
    Command run(folder, line.words);
    CHECK(run.wait() == 1);
    const std::string err = run.err();
    INFO(err);
    CHECK(err.starts_with("sherd: "));
    CHECK(std::ranges::count(err, '\n') == 1);
    CHECK_THAT(err, ContainsSubstring(line.written));
    CHECK_THAT(err, ContainsSubstring(line.way_out));
    CHECK(run.out().empty());
  }
}

TEST_CASE("a value that is empty is refused by its flag, but for a prompt") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  const std::pair<Arguments, std::vector<std::string>> commands[] = {
      {{"train"}, {"--data", "--out", "--trace", "--steps", "--lr", "--strategy"}},
      {{"bench"}, {"--out", "--against", "--trace", "--layers", "--dtype"}},
      {{"inspect"}, {"--svg", "--model", "--ranks"}},
      {{"sample"}, {"--checkpoint"}},
      {{"sample", "--checkpoint", "."}, {"--device"}},
      {{"report", "."}, {"--out"}},
      {{"merge", "."}, {"--out", "--part", "--config-from", "--group", "--max-shard-size"}},
      {{"split", "."}, {"--out", "--ranks"}},
      {{"launch", "-n", "1"}, {"--hosts", "--events", "--mpirun-arg", "--connect-within"}}};
  for (const auto& [command, flags] : commands)
    for (const std::string& flag : flags)
      for (const Arguments& empty : {Arguments{flag, ""}, Arguments{flag + "="}}) {
        const Arguments rest = command[0] == "launch"   ? Arguments{"true"}
                               : command[0] == "sample" ? Arguments{"--tokens", "5"}
                                                        : Arguments{};
        Command run(folder, with(with(command, empty), rest));
        CHECK(run.wait() == 1);
        INFO(flag << ": " << run.err());
        CHECK(std::ranges::count(run.err(), '\n') == 1);
        CHECK_THAT(run.err(), ContainsSubstring(flag));
        CHECK(run.out().empty());
      }
  Command nobody(folder, {"report", ""});
  CHECK(nobody.wait() == 1);
  CHECK_THAT(nobody.err(), ContainsSubstring("RUN stands there with an empty value"));
  // A program's own words stay as they are.
  Command program(folder, {"launch", "-n", "1", "echo", "--out=", "x"});
  if (program.wait() == 0) CHECK(program.out() == "--out= x\n");

  REQUIRE(Command(folder, with(train, {"--steps", "2", "--out", "run"})).wait() == 0);
  std::vector<std::string> texts;
  for (const Arguments& prompt : {Arguments{}, Arguments{"--prompt", ""}, Arguments{"--prompt="}}) {
    Command sample(folder, with(with({"sample", "--checkpoint", "run"}, prompt), {"--tokens", "5"}));
    CHECK(sample.wait() == 0);
    CHECK(sample.out().size() == 5 + 1);
    texts.push_back(sample.out());
  }
  CHECK(texts == std::vector(3, texts[0]));
}

TEST_CASE("options of which one would be in another's way are refused before anything is made") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  std::filesystem::create_directory(folder / "notes");
  write_file(folder / "notes/text", small_text());
  REQUIRE(Command(folder, with(train, {"--steps", "2", "--out", "old"})).wait() == 0);
  const Arguments bench = {"bench", "--layers",  "1", "--heads", "1", "--width",
                           "8",     "--context", "8", "--steps", "1"};
  const std::pair<Arguments, std::string> wrong[] = {
      {with(train, {"--trace", "one", "--out", "one"}), "--trace: 'one' is where the folder 'one' is made"},
      {with(train, {"--trace", "one", "--out", "one/"}), "--trace: 'one'"},
      {with(train, {"--trace", "./one", "--out", "one/run"}), "--trace: './one' is where the folder"},
      {with(train, {"--trace", "runs"}), "--trace: 'runs' is where the folder 'runs' is made"},
      {with(train, {"--trace", "runs/1"}), "--trace: 'runs/1' may be the folder of this run"},
      {with(train, {"--trace", "runs/1/trace"}), "--trace: 'runs/1/trace' lies in no folder"},
      {with(train, {"--trace", "one/step-2", "--out", "one"}), "'one/step-2' is where a checkpoint is made"},
      {with(train, {"--trace", "one/step-2.sherd-partial", "--out", "one"}), "is where a checkpoint is made"},
      {with(train, {"--trace", "one/metrics.jsonl", "--out", "one"}), "is a file of a run"},
      {with(train, {"--trace", "one/two/trace", "--out", "one"}), "lies in no folder that is there"},
      {with(train, {"--trace", "nowhere/trace", "--out", "one"}), "lies in no folder that is there"},
      {with(train, {"--trace", "text/trace", "--out", "one"}), "--trace: 'text/trace'"},
      {with(train, {"--trace", "text", "--out", "one"}), "--trace: 'text' is a file that this command reads"},
      {{"train", "--resume", "--out", "old", "--trace", "old/step-9"}, "is where a checkpoint is made"},
      {{"train", "--resume", "--out", "old", "--trace", "old/step-2/trace"}, "is where a checkpoint is made"},
      {{"train", "--resume", "--out", "old", "--trace", "old"}, "--trace: 'old' is a folder"},
      {with(train, {"--data", "notes", "--out", "notes/run"}), "--out 'notes/run': is read with the data"},
      {with(train, {"--data", "notes", "--out", "notes"}), "--out 'notes': is read with the data"},
      {with(train, {"--data", "."}), "--out 'runs': is read with the data"},
      {with(bench, {"--trace", "one", "--out", "one"}), "'one' is a file that this command reads or writes"},
      {with(bench, {"--trace", "./one", "--out", "one"}), "is a file that this command reads or writes"},
      {with(bench, {"--out", "nowhere/report"}), "--out: 'nowhere/report' lies in no folder"},
      {with(bench, {"--trace", "nowhere/trace"}), "--trace: 'nowhere/trace' lies in no folder"},
      {{"inspect", "--svg", "nowhere/svg"}, "--svg: 'nowhere/svg' lies in no folder"},
      {{"report", "old", "--out", "nowhere/page"}, "--out: 'nowhere/page' lies in no folder"},
      {{"report", "old", "--out", "old/step-2/config.json"}, "is a file of a run"},
      {{"launch", "-n", "1", "--events", "one", "echo", "--trace=./one"}, "--events: 'one' is a file"},
      {{"launch", "-n", "1", "--events", "one", "echo", "one"}, "--events: 'one' is a file"},
  };
  const auto all = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      if (entry.path() != folder / "err") names.push_back(entry.path().string());
    std::ranges::sort(names);
    return names;
  };
  const auto before = all();
  for (const auto& [arguments, part] : wrong) {
    Command run(folder, arguments);
    CHECK(run.wait() == 1);
    INFO(fmt::format("{}", fmt::join(arguments, " ")) << "\n" << run.err());
    CHECK(std::ranges::count(run.err(), '\n') == 1);
    CHECK_THAT(run.err(), ContainsSubstring(part));
    CHECK(run.out().empty());
    CHECK(all() == before);
  }
  // What is not in the way is none of that.
  CHECK(Command(folder, with(train, {"--steps", "2", "--trace", "one/trace", "--out", "one"})).wait() == 0);
  CHECK(Command(folder, with(train, {"--steps", "2", "--trace", "runs/trace"})).wait() == 0);
  CHECK(Command(folder, {"train", "--resume", "--steps", "3", "--trace", "runs/1/trace"}).wait() == 0);
  const Arguments hidden = with(train, {"--data", "notes", "--out", "notes/.run"});
  CHECK(Command(folder, with(hidden, {"--steps", "2"})).wait() == 0);
  CHECK(Command(folder, {"train", "--resume", "--steps", "3", "--out", "notes/.run"}).wait() == 0);
}

TEST_CASE("data whose path config.json cannot hold is refused, and the line can be read") {
  const TempDirectory folder;
  write_file(folder / "text", small_text());
  REQUIRE(Command(folder, with(train, {"--steps", "2", "--out", "run"})).wait() == 0);
  for (const std::string name : {"te\xffxt", "\xc3", "\xed\xa0\x80"}) {
    write_file(folder / name, small_text());
    const Arguments data = {"train", "--data", name};
    for (const Arguments& run : {data, with(data, {"--resume", "--out", "run"})}) {
      Command refused(folder, run);
      CHECK(refused.wait() == 1);
      INFO(refused.err());
      CHECK(std::ranges::count(refused.err(), '\n') == 1);
      CHECK_THAT(refused.err(), ContainsSubstring("is not UTF-8"));
      CHECK(nlohmann::json(refused.err()).dump().size() > 10);  // which throws for what is not
    }
  }
  CHECK_FALSE(std::filesystem::exists(folder / "runs"));
  write_file(folder / "t\xc3\xa4xt", small_text());
  REQUIRE(Command(folder, {"train", "--data", "t\xc3\xa4xt", "--layers", "1", "--width", "8", "--heads", "1",
                           "--context", "8", "--batch", "2", "--steps", "2", "--out", "other"})
              .wait() == 0);
  CHECK(Command(folder, {"train", "--resume", "--steps", "3", "--out", "other"}).wait() == 0);
}

TEST_CASE("the program says its version") {
  const TempDirectory folder;
  for (const Arguments& words : {Arguments{"--version"}, Arguments{"--version", "train"}}) {
    Command run(folder, words);
    CHECK(run.wait() == 0);
    CHECK(run.out() == "sherd " SHERD_VERSION "\n");
    CHECK(run.err().empty());
  }
  Command help(folder, {"--help"});
  CHECK(help.wait() == 0);
  CHECK_THAT(help.out(), ContainsSubstring("--version"));
}

TEST_CASE("every flag says its default and an example") {
  const TempDirectory folder;
  for (const std::string command : {"train", "sample", "inspect", "bench"}) {
    Command run(folder, {command, "--help"});
    CHECK(run.wait() == 0);
    std::istringstream help(run.out());
    int flags = 0;
    for (std::string line; std::getline(help, line);) {
      const std::size_t dashes = line.find("--");
      if (dashes != 2) continue;
      const std::string flag = line.substr(dashes, line.find_first_of(" =,", dashes) - dashes);
      INFO(line);
      CHECK_THAT(line, ContainsSubstring("default "));
      CHECK_THAT(line, ContainsSubstring("e.g. "));
      CHECK(line.find(flag, line.find("e.g. ")) != std::string::npos);
      ++flags;
    }
    CHECK(flags >= 6);
  }
}

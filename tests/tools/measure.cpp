// Runs a program and writes down the most memory it held: measure FILE PROGRAM ARGUMENTS... Small itself,
// since a process counts what it was forked from.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc < 3) return 127;
  const pid_t child = ::fork();
  if (child == 0) {
    ::execv(argv[2], argv + 2);
    ::_exit(127);
  }
  int status = 0;
  struct rusage usage{};
  if (::wait4(child, &status, 0, &usage) != child) return 127;
  std::FILE* file = std::fopen(argv[1], "w");
  if (file == nullptr) return 127;
  std::fprintf(file, "%ld", usage.ru_maxrss * 1024);
  std::fclose(file);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#include <sherd.h>

#include <Eigen/Dense>
#include <cstdio>

int main() {
  Eigen::Matrix4f a = Eigen::Matrix4f::Identity();
  try {
    sherd::fail<sherd::ValueError>("embed: trace {}", a.trace());
  } catch (const sherd::Error& error) {
    std::puts(error.what());
  }
}

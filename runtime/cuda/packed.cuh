// Wide loads and stores.
#pragma once

namespace sherd::cuda {

/// Neighbouring elements, loaded and stored at once.
template <int V, class T>
struct alignas(sizeof(T) * V) Packed {
  T at[V];
};
template <int V, class T>
__device__ Packed<V, T> load_pack(const T* from) {
  return *reinterpret_cast<const Packed<V, T>*>(from);
}
template <int V, class T>
__device__ void store_pack(T* to, const Packed<V, T>& pack) {
  *reinterpret_cast<Packed<V, T>*>(to) = pack;
}

}  // namespace sherd::cuda

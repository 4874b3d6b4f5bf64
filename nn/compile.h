// Compiling modules in place.
#pragma once

#include <string>

#include "autograd/compile.h"
#include "nn/module.h"

namespace sherd::nn {

/// From now on calls of `module` go by programs, as those of a function do (`sherd::compile`), equal to the
/// bit to its forward. Besides what a function's programs are for, they are for train or eval mode of the
/// module and each below, for the parameters and buffers that these have (by their memory) and which are
/// trained, and for the forward's arguments that are no tensors. So parameters may be replaced, frozen and
/// stepped; other fields that a forward reads (a number, a flag) are as at the first call: after a change of
/// one `compiled_programs(module).reset()`. What observes the module itself is called around a program; while
/// one below is observed, a call runs eagerly. So does one with an argument that is neither tensors nor a
/// number (a cache; a struct is, if all of its fields are tensors or `values_in` names the others), or of a
/// module below that was sharded meanwhile. Of a sharded module, or one within it, gathers and reductions are
/// made around its programs, the same as eagerly: a rank compiles without the others.
///
/// One that has sharded modules below is compiled in parts: what has none below gets programs, its own
/// forward calls these eagerly (StateError with `FullGraph::yes`), and programs end where sharding does
/// something. With `ShardingHooks::inside` it is one program, if it is sharded or runs within one that is:
/// where its forward and those below began and ended, and on the way back where its backward comes to these
/// places, the sharding does what it does eagerly, so calls among ranks and memory are the same (its own is
/// done around it while the module is observed). A call is made in parts that runs a sharded module, or reads
/// a group that is not here, within `recompute`, or that calls `unshard` or `reshard`. StateError for one
/// that is compiled. A clone is not compiled.
SHERD_API void compile(Module& module, CompileOptions options = {});
/// The module and those below run eagerly again, and may be compiled with other options. Backwards of calls
/// before it work on. Nothing where nothing is compiled.
SHERD_API void uncompile(Module& module);
/// The programs of a compiled module, all of its parts'; StateError for another.
SHERD_API CompiledPrograms& compiled_programs(const Module& module);

}  // namespace sherd::nn

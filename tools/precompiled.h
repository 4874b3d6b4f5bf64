// What most sources include, compiled once in builds with sanitizers, which have no time for it in each. The plain build
// does without, and so sees that every file includes what it uses.
#include <sherd.h>

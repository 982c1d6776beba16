// Tells when memory was written, if the system can tell.

#pragma once
#include <stdint.h>

struct span {
    uint64_t start, end; // addresses, or zeros for no memory
};

// Look which pages of spans were written since the look before. Returns the number of this look, from
// 1 on; 0 if the system cannot tell, or if another thread looks. `watched` gets 1 for each span whose
// memory the look could see.
int64_t look_for_writes(int64_t count, const struct span spans[], char watched[]);

// Tell whether a later look saw a write to a page of this memory.
int is_written_after(int64_t look, struct span span);

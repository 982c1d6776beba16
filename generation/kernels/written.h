// Finds memory that was written, if the system can tell.

#pragma once
#include <stdint.h>

struct span {
    uint64_t start, end; // addresses, or zeros for no memory
};

// Scan spans for pages that were written since the scan before. Returns the number of this scan, from 1
// on, or 0 if the system cannot tell or another thread is scanning. `watched` gets 1 for each span that
// was scanned.
int64_t scan_for_writes(int64_t count, const struct span spans[], char watched[]);

// Tell whether a later scan found a page of this memory written.
int is_written_after(int64_t scan, struct span span);

// Finds pages that were written since the last scan. This needs Linux 6.7.
//
// With userfaultfd, Linux protects pages of memory. The first write to a page removes its protection,
// and nothing else happens. PAGEMAP_SCAN finds the pages without protection, and protects them again.
// Some sandboxes forbid userfaultfd. Every call then compares all weights.

#define _GNU_SOURCE
#include "written.h"

#include "instructions.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

// Names and structures of Linux. Older headers lack some of them.
enum { USERFAULTFD = 323, USER_FAULTS_ONLY = 1 }; // the number of the call on x86-64, and a flag
struct api {
    uint64_t version, features, calls;
};
enum { VERSION = 0xaa, UNPOPULATED_PAGES = 1 << 13, NO_MESSAGES = 1 << 15 };
#define ASK_API _IOWR(0xaa, 0x3f, struct api)
struct registration {
    uint64_t start, bytes, mode, calls;
};
enum { NOTE_WRITES = 2 };
#define REGISTER _IOWR(0xaa, 0x00, struct registration)
struct region {
    uint64_t start, end, kinds;
};
struct scan {
    uint64_t size, flags, start, end, walk_end, regions, regions_count, max_pages, inverted;
    uint64_t required, any_of, returned;
};
enum { PROTECT_FOUND = 1, FAIL_AT_UNREGISTERED = 2 }; // flags of a scan
enum { WRITTEN = 2, PRESENT = 8 };                    // kinds of pages
#define SCAN _IOWR('f', 16, struct scan)

enum { PAGE = 1 << 12, SLOTS = 1 << 20, REGIONS = 64 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t process; // to which `faults` and `pages` belong
static int faults = -1, pages = -1;
static int64_t scans; // so far
// The scan that found the last write to each page. Pages at a distance of 4 GiB share an entry.
static int64_t found_in[SLOTS];

static void note_writes(uint64_t start, uint64_t end)
{
    for (uint64_t page = start / PAGE; page < end / PAGE; page++)
        found_in[page % SLOTS] = scans;
}

// Open the descriptors for this process. A forked child inherits its parent's. The child
// leaves them open, because their numbers may belong to other files by now.
static int can_scan(void)
{
    if (process == getpid())
        return pages >= 0;
    process = getpid();
    pages = -1;
    faults = (int)syscall(USERFAULTFD, O_CLOEXEC | O_NONBLOCK | USER_FAULTS_ONLY);
    if (faults < 0)
        return 0;
    struct api api = {.version = VERSION, .features = NO_MESSAGES | UNPOPULATED_PAGES};
    if (ioctl(faults, ASK_API, &api) == 0)
        pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pages < 0)
        close(faults);
    return pages >= 0;
}

// Register private memory around a span. Other programs can write unseen to shared memory and to files.
static void register_memory(struct span span)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t size = 0;
    while (maps && getline(&line, &size, maps) > 0) {
        unsigned long start, end, file;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &start, &end, &file) != 3 || file ||
            end <= span.start || start >= span.end)
            continue;
        struct registration private = {.start = start, .bytes = end - start, .mode = NOTE_WRITES};
        ioctl(faults, REGISTER, &private);
    }
    free(line);
    if (maps)
        fclose(maps);
}

// Note the writes to a span since the last scan. Returns 0 if not all of its memory is registered.
static char scan_span(struct span span)
{
    for (uint64_t start = span.start; start < span.end;) {
        struct region regions[REGIONS];
        struct scan scan = {
            .size = sizeof scan,
            .flags = PROTECT_FOUND | FAIL_AT_UNREGISTERED,
            .start = start,
            .end = span.end,
            .regions = (uintptr_t)regions,
            .regions_count = REGIONS,
            .any_of = WRITTEN | PRESENT, // PRESENT is inverted
            .inverted = PRESENT, // an absent page can come back with other values
            .returned = WRITTEN,
        };
        const int found = ioctl(pages, SCAN, &scan);
        if (found < 0 || scan.walk_end <= start) {
            note_writes(start, span.end); // the failed scan may have protected some pages
            return 0;
        }
        for (int i = 0; i < found; i++)
            note_writes(regions[i].start, regions[i].end);
        start = scan.walk_end;
    }
    return 1;
}

static struct span whole_pages(struct span span)
{
    return (struct span){span.start / PAGE * PAGE, (span.end + PAGE - 1) / PAGE * PAGE};
}

int64_t scan_for_writes(int64_t count, const struct span spans[], char watched[])
{
    // A forked child may inherit a locked mutex, so never wait for it.
    if (pthread_mutex_trylock(&mutex) != 0)
        return 0;
    int64_t scan = 0;
    if (can_scan()) {
        scan = ++scans;
        for (int64_t i = 0; i < count; i++) {
            const struct span span = whole_pages(spans[i]);
            watched[i] = span.end && scan_span(span);
            if (span.end && !watched[i]) {
                register_memory(span);
                watched[i] = scan_span(span);
            }
        }
    }
    pthread_mutex_unlock(&mutex);
    return scan;
}

int is_written_after(int64_t scan, struct span span)
{
    const struct span whole = whole_pages(span);
    for (uint64_t page = whole.start / PAGE; page < whole.end / PAGE; page++)
        if (found_in[page % SLOTS] > scan)
            return 1;
    return 0;
}

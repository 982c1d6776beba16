// Tells when memory was written: Linux notes it from version 6.7 on.
//
// With userfaultfd, Linux protects pages of memory. The first write to a page removes its protection,
// and nothing else happens. PAGEMAP_SCAN finds the pages without protection, and protects them again.
// Some sandboxes forbid userfaultfd.

#define _GNU_SOURCE
#include "written.h"

#include "instructions.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// Names and structures of Linux that older headers do not have.
enum {
    USER_FAULTS_ONLY = 1,
    UNPOPULATED_PAGES = 1 << 13, // can be protected too
    NO_MESSAGES = 1 << 15,       // for writes to protected pages
    PROTECT_FOUND = 1,
    FAIL_AT_UNREGISTERED = 2,
    WRITTEN = 2,
    PRESENT = 8,
};
struct region {
    uint64_t start, end, categories;
};
struct scan {
    uint64_t size, flags, start, end, walk_end, regions, regions_count, max_pages, inverted;
    uint64_t required, any_of, returned;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)

enum { PAGE = 1 << 12, SLOTS = 1 << 20, MAPPINGS = 64, REGIONS = 64 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t process; // whose memory the next two refer to
static int faults = -1, pages = -1;
static int64_t now; // looks so far
// The look that saw the last write to each page. Pages at a distance of 4 GiB share an entry.
static int64_t seen_at[SLOTS];
// Private memory that has the values of a file until it is written. Other programs may write to the
// file.
static struct mapping {
    char *name;
    struct stat state; // as it was when the memory was registered
    uint64_t start, end;
} mappings[MAPPINGS];
static int mappings_count;

static void note_writes(uint64_t start, uint64_t end)
{
    for (uint64_t page = start / PAGE; page < end / PAGE; page++)
        seen_at[page % SLOTS] = now;
}

// Open what tells about this process. A fork has copies for the memory of its parent.
static int can_tell(void)
{
    if (process == getpid())
        return pages >= 0;
    if (faults >= 0)
        close(faults);
    if (pages >= 0)
        close(pages);
    process = getpid();
    pages = -1;
    faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | USER_FAULTS_ONLY);
    struct uffdio_api api = {.api = UFFD_API, .features = NO_MESSAGES | UNPOPULATED_PAGES};
    if (faults >= 0 && ioctl(faults, UFFDIO_API, &api) == 0)
        pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    return pages >= 0;
}

static int same_state(const struct stat *one, const struct stat *other)
{
    return one->st_dev == other->st_dev && one->st_ino == other->st_ino &&
           one->st_size == other->st_size && one->st_mtim.tv_sec == other->st_mtim.tv_sec &&
           one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

// A line of /proc/self/maps.
struct line {
    unsigned long start, end, inode; // inode: 0 without a file
    int is_private;
    char *name, *text;
    size_t size;
};

static int read_line(FILE *maps, struct line *line)
{
    while (getline(&line->text, &line->size, maps) > 0) {
        char kind[5];
        int name = 0;
        line->text[strcspn(line->text, "\n")] = 0;
        if (sscanf(line->text, "%lx-%lx %4s %*s %*s %lu %n", &line->start, &line->end, kind,
                   &line->inode, &name) == 4) {
            line->is_private = kind[3] == 'p';
            line->name = line->text + name;
            return 1;
        }
    }
    free(line->text);
    fclose(maps);
    return 0;
}

// Forget a mapping. If its memory is still there, it will be registered again when it is looked at.
// Returns 0 if the system refuses.
static int forget(struct mapping *mapping)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    struct line line = {0};
    int done = maps != NULL;
    while (maps && read_line(maps, &line)) {
        struct uffdio_range range = {line.start, line.end - line.start};
        if (line.inode == mapping->state.st_ino && line.end > mapping->start &&
            line.start < mapping->end && ioctl(faults, UFFDIO_UNREGISTER, &range) != 0)
            done &= errno == EINVAL; // it was not registered
    }
    note_writes(mapping->start, mapping->end);
    if (done) {
        free(mapping->name);
        *mapping = mappings[--mappings_count];
    }
    return done;
}

// Count the memory of a file as written if the file was.
static void look_at_files(void)
{
    for (int i = mappings_count - 1; i >= 0; i--) {
        struct stat state;
        if (stat(mappings[i].name, &state) != 0 || !same_state(&state, &mappings[i].state))
            forget(&mappings[i]);
    }
}

// Remember the file of private memory. Returns 0 if a write to it would not be seen.
static int remember(const struct line *line)
{
    struct mapping new = {.start = line->start, .end = line->end};
    if (stat(line->name, &new.state) != 0 || new.state.st_ino != line->inode)
        return 0;
    for (int i = mappings_count - 1; i >= 0; i--) {
        struct mapping *old = &mappings[i];
        if (old->start > new.start || old->end < new.end)
            continue;
        if (strcmp(old->name, line->name) == 0 && same_state(&old->state, &new.state))
            return 1;
        if (!forget(old)) // another file was here before
            return 0;
    }
    if (mappings_count == MAPPINGS && !forget(&mappings[0]))
        return 0;
    if (!(new.name = strdup(line->name)))
        return 0;
    mappings[mappings_count++] = new;
    return 1;
}

// Register private memory around a span. Other processes can write to memory that is shared.
static void register_memory(struct span span)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    struct line line = {0};
    while (maps && read_line(maps, &line)) {
        if (line.end <= span.start || line.start >= span.end || !line.is_private)
            continue;
        if (line.inode && !remember(&line))
            continue;
        struct uffdio_register range = {.range = {line.start, line.end - line.start},
                                        .mode = UFFDIO_REGISTER_MODE_WP};
        ioctl(faults, UFFDIO_REGISTER, &range);
    }
}

// Note the writes to a span since the last look. Returns 0 if not all of its memory is registered.
static char look_at(struct span span)
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
            .inverted = PRESENT, // a page that was taken away may come back with other values
            .any_of = WRITTEN | PRESENT,
            .returned = WRITTEN,
        };
        const int found = ioctl(pages, PAGEMAP_SCAN, &scan);
        if (found < 0 || scan.walk_end <= start) {
            note_writes(start, span.end); // some of the pages may be protected again
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

int64_t look_for_writes(int64_t count, const struct span spans[], char watched[])
{
    // The mutex may be locked for ever in a fork.
    if (pthread_mutex_trylock(&mutex) != 0)
        return 0;
    int64_t look = 0;
    if (can_tell()) {
        look = ++now;
        look_at_files();
        for (int64_t i = 0; i < count; i++) {
            const struct span span = whole_pages(spans[i]);
            watched[i] = span.end && look_at(span);
            if (span.end && !watched[i]) {
                register_memory(span);
                watched[i] = look_at(span);
            }
        }
    }
    pthread_mutex_unlock(&mutex);
    return look;
}

int is_written_after(int64_t look, struct span span)
{
    const struct span whole = whole_pages(span);
    for (uint64_t page = whole.start / PAGE; page < whole.end / PAGE; page++)
        if (seen_at[page % SLOTS] > look)
            return 1;
    return 0;
}

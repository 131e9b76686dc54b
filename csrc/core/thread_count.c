/* thread_count.c -- the default number of threads of a call.
 *
 * In order of precedence: the calling thread's override, the process's setting, CATTN_NUM_THREADS, OMP_NUM_THREADS (the
 * first number of its list; ignored if that is no number), and the number of processors that this process may use.
 *
 * Environment and system are asked once, when the count is first needed.
 */
#include "os.h"
#include "parallel.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local int thread_override; /* 0: none */
static atomic_int process_setting;        /* 0: none */

static cattn_once environment_once = CATTN_ONCE_INIT;
static int environment_count; /* >= 1 after environment_once */

/* Parses a positive decimal integer that is the whole text or, with comma_ends, ends at a comma. 0: it is none. A
 * number that is too large for an int becomes INT_MAX. */
static int parse_count(const char *text, bool comma_ends) {
    int count = 0;
    text += strspn(text, " \t");
    size_t n_digits = strspn(text, "0123456789");
    for (size_t i = 0; i < n_digits; i++) {
        int digit = text[i] - '0';
        count = count > (INT_MAX - digit) / 10 ? INT_MAX : 10 * count + digit;
    }
    text += n_digits;
    text += strspn(text, " \t");
    return *text == '\0' || (comma_ends && *text == ',') ? count : 0;
}

bool cattn_is_thread_count(const char *text) {
    const int count = parse_count(text, false);
    return count > 0 && count < INT_MAX;
}

/* ---- environment ---- */

static void read_environment(void) {
    const char *own = getenv("CATTN_NUM_THREADS");
    const char *openmp = getenv("OMP_NUM_THREADS");
    int count = own != NULL ? parse_count(own, false) : 0;
    if (count == 0 && openmp != NULL)
        count = parse_count(openmp, true);
    environment_count = count > 0 ? count : cattn_usable_cpus();
}

/* ---- the count ---- */

static int wanted_count(void) {
    if (thread_override > 0)
        return thread_override;
    int setting = atomic_load_explicit(&process_setting, memory_order_relaxed);
    if (setting > 0)
        return setting;
    cattn_run_once(&environment_once, read_environment);
    return environment_count;
}

int cattn_get_num_threads(void) {
    const int count = wanted_count();
    return count < CATTN_MAX_THREADS ? count : CATTN_MAX_THREADS;
}

void cattn_set_num_threads(int n) { atomic_store_explicit(&process_setting, n > 0 ? n : 0, memory_order_relaxed); }

int cattn_override_num_threads(int n) {
    int previous = thread_override;
    thread_override = n > 0 ? n : 0;
    return previous;
}

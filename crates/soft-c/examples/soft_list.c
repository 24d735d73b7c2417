/* List in soft memory whose oldest entries are lost under memory pressure.
 *
 * Build: cc soft_list.c $(pkg-config --cflags --libs tarnsoft) -o soft_list
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tarnsoft.h>

/* Entry of the list. It refers to the next entry by its handle, because an address is only valid while the entry is
 * pinned. */
struct entry {
    soft_handle_t next;
    unsigned number;
    char text[2000];
};

struct list {
    soft_context_t *context;
    soft_handle_t newest;
    unsigned lost;
};

/* Receives an entry before it is lost. The oldest entries are lost first, because their blocks are the oldest. */
static void count_lost(soft_handle_t handle, const void *data, size_t size, void *user_data)
{
    struct list *list = user_data;
    struct entry entry;
    (void)handle;
    if (size == sizeof entry) {
        memcpy(&entry, data, sizeof entry);
        printf("lost: %s\n", entry.text);
        list->lost++;
    }
}

/* Adds an entry. Gives up the oldest entries if the budget is used up. */
static int add(struct list *list, unsigned number)
{
    soft_handle_t handle = soft_malloc(list->context, sizeof(struct entry));
    if (handle == 0 && soft_last_error() == SOFT_ERROR_OUT_OF_BUDGET && soft_reclaim(list->context, 1) != 0) {
        handle = soft_malloc(list->context, sizeof(struct entry));
    }
    struct entry *entry = soft_pin(list->context, handle);
    if (entry == NULL) {
        return soft_last_error();
    }
    entry->next = list->newest;
    entry->number = number;
    snprintf(entry->text, sizeof entry->text, "entry %u", number);
    list->newest = handle;
    return soft_unpin(list->context, handle);
}

/* Copies the numbers of the entries, from the newest to the oldest that still exists. A pin makes an entry younger, so
 * the list is read from the oldest entry if its order of eviction must not change. */
static unsigned count(const struct list *list)
{
    unsigned entries = 0;
    soft_handle_t handle = list->newest;
    struct entry *entry;
    while ((entry = soft_pin(list->context, handle)) != NULL) {
        soft_handle_t next = entry->next;
        soft_unpin(list->context, handle);
        handle = next;
        entries++;
    }
    return entries;
}

int main(void)
{
    struct list list = {NULL, 0, 0};
    soft_pool_t *pool = soft_pool_create(8);
    list.context = soft_context_create(pool, 0, count_lost, &list);
    if (list.context == NULL) {
        fprintf(stderr, "cannot create the list: %s\n", soft_last_error_message());
        return EXIT_FAILURE;
    }
    for (unsigned number = 0; number < 20; number++) {
        if (add(&list, number) != SOFT_OK) {
            fprintf(stderr, "cannot add an entry: %s\n", soft_last_error_message());
            return EXIT_FAILURE;
        }
    }
    printf("pages revoked: %zu\n", soft_revoke(pool, 4));
    printf("entries: %u, lost: %u\n", count(&list), list.lost);
    return soft_context_destroy(list.context) == SOFT_OK && soft_pool_destroy(pool) == SOFT_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

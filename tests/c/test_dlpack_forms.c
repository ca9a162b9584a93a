/* Tables of the forms of tensors that a made-up library tells of. */
#include "check.h"
#include "dlpack_forms.h"

#include <errno.h>
#include <string.h>

static int told(void *object, struct dlpack_tensor *into)
{
    const struct dlpack_tensor *tensor = object;
    if (!tensor)
        return -1;
    *into = *tensor;
    return 0;
}

static void test_forms_lie_back_to_back(void)
{
    const struct dlpack_exchange api = {.major = DLPACK_MAJOR, .tensor_of = told};
    const int64_t shape[] = {2, 3}, strides[] = {1, 2};
    struct dlpack_tensor matrix = {.device = {1, 4}, .dimensions = 2, .dtype = {2, 32, 1}, .shape = shape,
                                   .strides = strides};
    struct dlpack_tensor scalar = {.device = {2, 5}, .dtype = {0, 8, 1}};
    struct dlpack_forms forms = {0};
    struct dlpack_tensor described;
    const size_t head = 3 * sizeof(int32_t) + sizeof(struct dlpack_dtype), both = 2 * head + 4 * sizeof(int64_t);

    for (size_t round = 1; round < 200; round++) {
        CHECK(dlpack_forms_add(&forms, &api, &matrix, &described) == 0);
        CHECK(described.shape == shape);
        CHECK(dlpack_forms_add(&forms, &api, &scalar, &described) == 0);
        CHECK(forms.used == round * both);
        CHECK(forms.room >= forms.used);
        const char *at = forms.table + (round - 1) * both;
        const int32_t first[] = {1, 4, 2}, second[] = {2, 5, 0};
        CHECK(memcmp(at, first, sizeof first) == 0);
        CHECK(memcmp(at + sizeof first, &matrix.dtype, sizeof matrix.dtype) == 0);
        CHECK(memcmp(at + head, shape, sizeof shape) == 0);
        CHECK(memcmp(at + head + sizeof shape, strides, sizeof strides) == 0);
        CHECK(memcmp(at + head + 2 * sizeof shape, second, sizeof second) == 0);
    }
    dlpack_forms_free(&forms);
    CHECK(!forms.table && !forms.used && !forms.room);
}

static void test_what_is_not_told_is_not_added(void)
{
    const struct dlpack_exchange api = {.major = DLPACK_MAJOR, .tensor_of = told};
    const int64_t shape[] = {2};
    struct dlpack_tensor without = {.dimensions = 1, .shape = shape}, negative = {.dimensions = -1};
    struct dlpack_forms forms = {0};
    struct dlpack_tensor described;
    CHECK(dlpack_forms_add(&forms, &api, NULL, &described) == -EINVAL);
    CHECK(dlpack_forms_add(&forms, &api, &without, &described) == -ENODATA);
    CHECK(dlpack_forms_add(&forms, &api, &negative, &described) == -ENODATA);
    CHECK(forms.used == 0);
    dlpack_forms_free(&forms);
}

static void test_the_known_version_is_found(void)
{
    const struct dlpack_exchange known = {.major = DLPACK_MAJOR, .tensor_of = told};
    const struct dlpack_exchange newer = {.major = DLPACK_MAJOR + 1, .older = &known, .tensor_of = told};
    const struct dlpack_exchange silent = {.major = DLPACK_MAJOR}, old = {.major = DLPACK_MAJOR - 1, .tensor_of = told};
    const struct dlpack_exchange alone = {.major = DLPACK_MAJOR + 1, .tensor_of = told};
    CHECK(dlpack_known(&known) == &known);
    CHECK(dlpack_known(&newer) == &known);
    CHECK(!dlpack_known(&silent) && !dlpack_known(&old) && !dlpack_known(&alone) && !dlpack_known(NULL));
}

int main(void)
{
    test_forms_lie_back_to_back();
    test_what_is_not_told_is_not_added();
    test_the_known_version_is_found();
    return 0;
}

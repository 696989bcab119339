/* What the stubs of generate.py do: say in the log that they were called, and answer. */
#include "machine.h"
#include "symbols.h"

int answer_unsupported(const char *name, int code)
{
    log_call(name);
    return code;
}

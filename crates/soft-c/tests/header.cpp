// Includes the header from C++.

#include <tarnsoft.h>

int main() {
    return soft_last_error();
}

// Attention to the keys and values of this library.
#include "weights.h"

template class Attention<Runs>;

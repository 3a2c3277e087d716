"""Operations on sparse documents: compiled loops for wide models on the CPU, sparse products on every device."""

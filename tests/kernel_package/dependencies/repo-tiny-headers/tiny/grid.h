// Stands for what a kernel package fetches (CUTLASS and others): headers that lie outside of it.
#pragma once
constexpr int TINY_THREADS = 128;
inline int tiny_blocks(int count) { return (count + TINY_THREADS - 1) / TINY_THREADS; }

"""Tests of parallel code, shipped for users' own layers: a world of ranks and layout-equivalence checks."""

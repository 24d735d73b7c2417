//! Tests of soft structures.

//! Copies of a store, and a store from a copy.

//! A disk for tests that tears and forgets: what was synced, what was not, and a cut between them. It decides nothing by
//! itself; whoever cuts the power chooses what survives.

//! Answers of the daemon for which commands wait.

/// Number of the daemon's answer for which a command waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer(pub u64);

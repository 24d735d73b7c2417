//! What system tests share.

pub mod rack;

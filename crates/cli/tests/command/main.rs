//! The command `tarn` as people and scripts meet it: the real binary against a rack that answers from a card.
#![allow(missing_docs, clippy::unwrap_used, reason = "this crate is a test through and through")]

mod answers;
mod evaluate;
mod orders;
mod rack;
mod refusals;
mod shares;
mod terminal;
mod ways;
mod words;

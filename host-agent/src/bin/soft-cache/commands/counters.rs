//! Commands that change integers: INCR, DECR, INCRBY and DECRBY.

use crate::{
    call::{Call, argument, integer_argument},
    error::CommandError,
    integer::{parse_integer, push_integer},
    request::Request,
};

/// INCR key
pub fn incr(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    add(call, request, 1)
}

/// DECR key
pub fn decr(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    add(call, request, -1)
}

/// INCRBY key increment
pub fn incrby(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    add(call, request, integer_argument(request, 2)?)
}

/// DECRBY key decrement
pub fn decrby(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let decrement = integer_argument(request, 2)?;
    add(call, request, decrement.checked_neg().ok_or(CommandError::DecrementOverflow)?)
}

/// Adds to the integer of a key, which is 0 without a value. Keeps the expiry time.
fn add(call: &mut Call<'_>, request: Request<'_>, increment: i64) -> Result<(), CommandError> {
    let key = argument(request, 1)?;
    let old = call.server.store.read(key, call.now, |expiry, value| (expiry, parse_integer(value)));
    let (expiry, old) = old.unwrap_or((None, Some(0)));
    let sum = old.ok_or(CommandError::NotAnInteger)?.checked_add(increment);
    let sum = sum.ok_or(CommandError::Overflow)?;
    let mut text = Vec::with_capacity(20); // characters of the longest integer
    push_integer(&mut text, sum);
    call.store(key, [&text, b""], expiry)?;
    call.reply.integer(sum);
    Ok(())
}

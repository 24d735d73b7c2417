//! Commands on keys and their expiry times: DEL, UNLINK, EXISTS, EXPIRE, PEXPIRE, PERSIST, TTL and PTTL.

use units::UnixMs;

use crate::{
    call::{Call, argument, integer_argument},
    error::CommandError,
    request::Request,
};

/// Reply of TTL for a key without a value.
const NO_VALUE: i64 = -2;
/// Reply of TTL for a value that does not expire.
const NO_EXPIRY: i64 = -1;

/// DEL key [key ...]
pub fn del(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let Call { server, now, .. } = call;
    let removed = request.arguments_from(1).filter(|key| server.store.remove(key, *now)).count();
    call.reply.count(removed);
    Ok(())
}

/// EXISTS key [key ...]
pub fn exists(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let Call { server, now, .. } = call;
    let found = request.arguments_from(1).filter(|key| server.store.contains(key, *now)).count();
    call.reply.count(found);
    Ok(())
}

/// EXPIRE key seconds
pub fn expire(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    expire_after(call, request, 1000, "expire")
}

/// PEXPIRE key milliseconds
pub fn pexpire(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    expire_after(call, request, 1, "pexpire")
}

/// Sets the expiry time of a key. Removes the key if the time has passed.
fn expire_after(
    call: &mut Call<'_>,
    request: Request<'_>,
    unit_ms: i64,
    command: &'static str,
) -> Result<(), CommandError> {
    let key = argument(request, 1)?;
    let expiry = expiry_after(call.now, integer_argument(request, 2)?, unit_ms, command)?;
    let has_value = match expiry <= call.now {
        true => call.server.store.remove(key, call.now),
        false => call.set_expiry(key, Some(expiry))?,
    };
    call.reply.integer(has_value.into());
    Ok(())
}

/// PERSIST key
pub fn persist(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let key = argument(request, 1)?;
    let expires = call.server.store.peek(key, call.now, |expiry, _| expiry.is_some()).unwrap_or(false);
    let is_changed = expires && call.set_expiry(key, None)?;
    call.reply.integer(is_changed.into());
    Ok(())
}

/// TTL key
pub fn ttl(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    // Redis rounds to the nearest second.
    reply_remaining(call, request, |ms| (ms + 500) / 1000)
}

/// PTTL key
pub fn pttl(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    reply_remaining(call, request, |ms| ms)
}

fn reply_remaining(
    call: &mut Call<'_>,
    request: Request<'_>,
    in_unit: impl FnOnce(u64) -> u64,
) -> Result<(), CommandError> {
    let now = call.now;
    let expiry = call.server.store.peek(argument(request, 1)?, now, |expiry, _| expiry);
    call.reply.integer(match expiry {
        None => NO_VALUE,
        Some(None) => NO_EXPIRY,
        Some(Some(UnixMs(expiry))) => i64::try_from(in_unit(expiry - now.0)).unwrap_or(i64::MAX),
    });
    Ok(())
}

/// Returns the time `span` units of `unit_ms` milliseconds after `now`, at least 0.
///
/// # Errors
/// [`CommandError::ExpireTime`] if the time in milliseconds exceeds 63 bits.
pub fn expiry_after(
    now: UnixMs,
    span: i64,
    unit_ms: i64,
    command: &'static str,
) -> Result<UnixMs, CommandError> {
    let now = i64::try_from(now.0).ok();
    let expiry = span.checked_mul(unit_ms).and_then(|span| now?.checked_add(span));
    let expiry = expiry.ok_or(CommandError::ExpireTime(command))?;
    Ok(UnixMs(u64::try_from(expiry.max(0)).unwrap_or(0)))
}

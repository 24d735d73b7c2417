//! Commands that read and write values: GET, SET, SETEX, SETNX, MGET, MSET, APPEND and STRLEN.

use units::{UnixMs, limits::SOFT_CACHE_VALUE_BYTES_MAX};

use super::keys::expiry_after;
use crate::{
    call::{Call, argument, integer_argument},
    error::CommandError,
    request::Request,
};

/// GET key
pub fn get(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    reply_value(call, argument(request, 1)?);
    Ok(())
}

/// MGET key [key ...]
pub fn mget(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let keys = request.arguments_from(1);
    call.reply.array(keys.len());
    keys.for_each(|key| reply_value(call, key));
    Ok(())
}

fn reply_value(call: &mut Call<'_>, key: &[u8]) {
    let reply = &mut call.reply;
    if call.server.store.get(key, call.now, |value| reply.bulk(value)).is_none() {
        reply.null();
    }
}

/// Condition of SET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    /// Only if the key has no value.
    Absent,
    /// Only if the key has a value.
    Present,
}

/// Expiry time of SET.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SetExpiry {
    /// The value does not expire.
    #[default]
    Never,
    /// The expiry time of the old value.
    Keep,
    At(UnixMs),
}

/// SET key value [NX | XX] [GET] [EX seconds | PX milliseconds | KEEPTTL]
#[derive(Debug)]
struct Set<'a> {
    key: &'a [u8],
    value: &'a [u8],
    condition: Option<Condition>,
    expiry: SetExpiry,
    /// Whether the reply is the old value.
    returns_old: bool,
}

impl<'a> Set<'a> {
    fn new(key: &'a [u8], value: &'a [u8]) -> Self {
        Self { key, value, condition: None, expiry: SetExpiry::Never, returns_old: false }
    }

    fn parse(request: Request<'a>, now: UnixMs) -> Result<Self, CommandError> {
        let mut set = Self::new(argument(request, 1)?, argument(request, 2)?);
        let mut index = 3;
        while let Some(option) = request.get(index) {
            index += 1;
            let unit = |name: &[u8]| option.eq_ignore_ascii_case(name);
            if unit(b"NX") || unit(b"XX") {
                let condition = if unit(b"NX") { Condition::Absent } else { Condition::Present };
                if set.condition.replace(condition).is_some_and(|other| other != condition) {
                    return Err(CommandError::Syntax);
                }
            } else if unit(b"GET") {
                set.returns_old = true;
            } else if set.expiry != SetExpiry::Never {
                return Err(CommandError::Syntax);
            } else if unit(b"KEEPTTL") {
                set.expiry = SetExpiry::Keep;
            } else if unit(b"EX") || unit(b"PX") {
                let unit_ms = if unit(b"EX") { 1000 } else { 1 };
                set.expiry = SetExpiry::At(positive_expiry(request, index, unit_ms, now, "set")?);
                index += 1;
            } else {
                return Err(CommandError::Syntax);
            }
        }
        Ok(set)
    }

    /// Returns whether the value was stored.
    fn apply(&self, call: &mut Call<'_>) -> Result<bool, CommandError> {
        let Call { server, now, .. } = *call;
        if let Some(condition) = self.condition
            && server.store.contains(self.key, now) != (condition == Condition::Present)
        {
            return Ok(false);
        }
        let expiry = match self.expiry {
            SetExpiry::Never => None,
            SetExpiry::At(expiry) => Some(expiry),
            SetExpiry::Keep => server.store.peek(self.key, now, |expiry, _| expiry).flatten(),
        };
        call.store(self.key, [self.value, b""], expiry)?;
        Ok(true)
    }
}

/// SET key value [NX | XX] [GET] [EX seconds | PX milliseconds | KEEPTTL]
pub fn set(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let set = Set::parse(request, call.now)?;
    let old = if set.returns_old { call.server.store.copy(set.key, call.now) } else { None };
    let is_stored = set.apply(call)?;
    match old {
        Some((_, old)) => call.reply.bulk(&old),
        None if set.returns_old || !is_stored => call.reply.null(),
        None => call.reply.status("OK"),
    }
    Ok(())
}

/// SETEX key seconds value
pub fn setex(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let expiry = SetExpiry::At(positive_expiry(request, 2, 1000, call.now, "setex")?);
    Set { expiry, ..Set::new(argument(request, 1)?, argument(request, 3)?) }.apply(call)?;
    call.reply.status("OK");
    Ok(())
}

/// SETNX key value
pub fn setnx(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let set = Set::new(argument(request, 1)?, argument(request, 2)?);
    let is_stored = Set { condition: Some(Condition::Absent), ..set }.apply(call)?;
    call.reply.integer(is_stored.into());
    Ok(())
}

/// MSET key value [key value ...]
pub fn mset(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    if request.len().is_multiple_of(2) {
        return Err(CommandError::ArgumentCount("mset"));
    }
    let mut arguments = request.arguments_from(1);
    while let (Some(key), Some(value)) = (arguments.next(), arguments.next()) {
        call.store(key, [value, b""], None)?;
    }
    call.reply.status("OK");
    Ok(())
}

/// APPEND key value
pub fn append(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let (key, suffix) = (argument(request, 1)?, argument(request, 2)?);
    let (expiry, old) = call.server.store.copy(key, call.now).unwrap_or_default();
    let len = old.len() + suffix.len();
    if len > SOFT_CACHE_VALUE_BYTES_MAX {
        return Err(CommandError::TooLong(SOFT_CACHE_VALUE_BYTES_MAX));
    }
    call.store(key, [&old, suffix], expiry)?;
    call.reply.count(len);
    Ok(())
}

/// STRLEN key
pub fn strlen(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let len = call.server.store.get(argument(request, 1)?, call.now, <[u8]>::len);
    call.reply.count(len.unwrap_or(0));
    Ok(())
}

/// Returns the time after a positive argument in units of `unit_ms` milliseconds.
fn positive_expiry(
    request: Request<'_>,
    index: usize,
    unit_ms: i64,
    now: UnixMs,
    command: &'static str,
) -> Result<UnixMs, CommandError> {
    let span = integer_argument(request, index)?;
    if span <= 0 {
        return Err(CommandError::ExpireTime(command));
    }
    expiry_after(now, span, unit_ms, command)
}

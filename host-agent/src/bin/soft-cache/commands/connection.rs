//! Commands on the connection: PING, ECHO, HELLO, AUTH, SELECT, CLIENT and QUIT.

use units::limits::SOFT_CACHE_CLIENT_NAME_BYTES_MAX;

use crate::{
    call::{Call, argument, integer_argument},
    error::{CommandError, shortened},
    integer::parse_integer,
    reply::Protocol,
    request::Request,
};

/// Name of the only user.
const USER: &[u8] = b"default";

/// PING [message]
pub fn ping(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    match request.get(1) {
        Some(message) => call.reply.bulk(message),
        None => call.reply.status("PONG"),
    }
    Ok(())
}

/// ECHO message
pub fn echo(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    call.reply.bulk(argument(request, 1)?);
    Ok(())
}

/// QUIT
pub fn quit(call: &mut Call<'_>, _: Request<'_>) -> Result<(), CommandError> {
    call.session.is_closing = true;
    call.reply.status("OK");
    Ok(())
}

/// SELECT index
pub fn select(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    match integer_argument(request, 1)? {
        0 => call.reply.status("OK"),
        _ => return Err(CommandError::Database),
    }
    Ok(())
}

/// AUTH [username] password
pub fn auth(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    match (request.get(1), request.get(2)) {
        (Some(password), None) if call.server.password.is_some() => authenticate(call, USER, password)?,
        (Some(_), None) => return Err(CommandError::NoPassword),
        (Some(user), Some(password)) => authenticate(call, user, password)?,
        _ => return Err(CommandError::ArgumentCount("auth")),
    }
    call.reply.status("OK");
    Ok(())
}

/// Authenticates the client. Without a password of the server, each password is right, as in Redis.
fn authenticate(call: &mut Call<'_>, user: &[u8], password: &[u8]) -> Result<(), CommandError> {
    let is_right = call.server.password.as_ref().is_none_or(|right| right.matches(password));
    if user != USER || !is_right {
        call.server.password_log.log(&call.session.client(), &"wrong user or password");
        return Err(CommandError::WrongPassword);
    }
    call.session.is_authenticated = true;
    Ok(())
}

/// HELLO [protocol [AUTH username password] [SETNAME name]]
#[derive(Debug, Default)]
struct Hello<'a> {
    protocol: Option<Protocol>,
    /// User and password.
    credentials: Option<(&'a [u8], &'a [u8])>,
    name: Option<&'a [u8]>,
}

impl<'a> Hello<'a> {
    fn parse(request: Request<'a>) -> Result<Self, CommandError> {
        let mut hello = Self::default();
        let Some(version) = request.get(1) else { return Ok(hello) };
        hello.protocol = match parse_integer(version).ok_or(CommandError::ProtocolNotAnInteger)? {
            2 => Some(Protocol::Resp2),
            3 => Some(Protocol::Resp3),
            _ => return Err(CommandError::Protocol),
        };
        let mut options = request.arguments_from(2);
        while let Some(option) = options.next() {
            let next = options.next().ok_or(CommandError::Syntax)?;
            if option.eq_ignore_ascii_case(b"AUTH") {
                hello.credentials = Some((next, options.next().ok_or(CommandError::Syntax)?));
            } else if option.eq_ignore_ascii_case(b"SETNAME") {
                hello.name = Some(checked_name(next)?);
            } else {
                return Err(CommandError::Syntax);
            }
        }
        Ok(hello)
    }

    fn apply(self, call: &mut Call<'_>) -> Result<(), CommandError> {
        if let Some((user, password)) = self.credentials {
            authenticate(call, user, password)?;
        }
        if !call.session.is_authenticated {
            return Err(CommandError::HelloNotAuthenticated);
        }
        if let Some(name) = self.name {
            call.session.name = name.to_vec();
        }
        call.session.protocol = self.protocol.unwrap_or(call.session.protocol);
        call.reply.protocol = call.session.protocol;
        Ok(())
    }
}

/// HELLO [protocol [AUTH username password] [SETNAME name]]
pub fn hello(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    Hello::parse(request)?.apply(call)?;
    let (id, protocol) = (call.session.id, call.session.protocol.number());
    let reply = &mut call.reply;
    reply.map(7);
    for (name, text) in [("server", "soft-cache"), ("version", env!("CARGO_PKG_VERSION"))] {
        reply.bulk(name.as_bytes());
        reply.bulk(text.as_bytes());
    }
    reply.bulk(b"proto");
    reply.integer(protocol);
    reply.bulk(b"id");
    reply.integer(id.cast_signed());
    for (name, text) in [("mode", "standalone"), ("role", "master")] {
        reply.bulk(name.as_bytes());
        reply.bulk(text.as_bytes());
    }
    reply.bulk(b"modules");
    reply.array(0);
    Ok(())
}

/// CLIENT subcommand
pub fn client(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let subcommand = argument(request, 1)?.to_ascii_lowercase();
    match (subcommand.as_slice(), request.len()) {
        (b"id", 2) => call.reply.integer(call.session.id.cast_signed()),
        (b"getname", 2) if call.session.name.is_empty() => call.reply.null(),
        (b"getname", 2) => call.reply.bulk(&call.session.name),
        (b"setname", 3) => {
            call.session.name = checked_name(argument(request, 2)?)?.to_vec();
            call.reply.status("OK");
        }
        // The name and version of a client library are not stored.
        (b"setinfo", 4) => call.reply.status("OK"),
        (b"id", _) => return Err(CommandError::ArgumentCount("client|id")),
        (b"getname", _) => return Err(CommandError::ArgumentCount("client|getname")),
        (b"setname", _) => return Err(CommandError::ArgumentCount("client|setname")),
        (b"setinfo", _) => return Err(CommandError::ArgumentCount("client|setinfo")),
        _ => {
            let subcommand = shortened(argument(request, 1)?);
            return Err(CommandError::UnknownSubcommand { command: "CLIENT", subcommand });
        }
    }
    Ok(())
}

fn checked_name(name: &[u8]) -> Result<&[u8], CommandError> {
    let is_valid = name.len() <= SOFT_CACHE_CLIENT_NAME_BYTES_MAX && name.iter().all(u8::is_ascii_graphic);
    if is_valid { Ok(name) } else { Err(CommandError::ClientName) }
}

//! Tests of the commands, without a network.

use std::sync::Arc;

use soft::Pool;
use units::UnixMs;

use super::*;
use crate::{
    memory::Memory,
    reply::{Output, Reply},
    request::{RequestLimits, RequestParser},
    server::Server,
    session::{Peer, Session},
};

const PEER: Peer = Peer::Unix { pid: 1, uid: 0 };

/// Server and one client.
struct Rig {
    pool: Arc<Pool>,
    server: Server,
    session: Session,
    now: u64,
}

impl Rig {
    fn new() -> Self {
        Self::with_pages(1024)
    }

    fn with_pages(pages: usize) -> Self {
        let memory = Memory::constant(pages).unwrap();
        let pool = memory.pool().clone();
        let server = Server::new(memory, None, 10).unwrap();
        Self { pool, server, session: Session::new(7, PEER, true), now: 1_000_000 }
    }

    /// Executes inline commands, and returns their replies. Line ends are shown as spaces.
    fn run(&mut self, lines: &str) -> String {
        let replies: String = lines.lines().map(|line| self.execute(&format!("{line}\n"))).collect();
        replies.replace("\r\n", " ").trim_end().to_owned()
    }

    /// Sets a key of many bytes, which an inline command cannot contain.
    fn set_long_key(&mut self, key: &str) -> String {
        self.execute(&format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n$1\r\nx\r\n", key.len()))
    }

    fn execute(&mut self, request: &str) -> String {
        let (mut output, mut parser) = (Output::default(), RequestParser::default());
        parser.parse(request.as_bytes(), RequestLimits::Full).unwrap().unwrap();
        let reply = Reply::new(&mut output, self.session.protocol);
        let now = UnixMs(self.now);
        let mut call = Call { server: &self.server, session: &mut self.session, reply, now };
        execute(&mut call, parser.request(request.as_bytes()));
        String::from_utf8(output.bytes).unwrap()
    }
}

#[track_caller]
fn assert_replies(rig: &mut Rig, expected: &[(&str, &str)]) {
    for (lines, reply) in expected {
        assert_eq!(rig.run(lines), *reply, "{lines}");
    }
}

#[test]
fn commands_are_sorted_and_have_short_names() {
    assert!(COMMANDS.windows(2).all(|pair| pair[0].name < pair[1].name));
    assert!(COMMANDS.iter().all(|command| command.name.len() <= NAME_BYTES_MAX));
    assert!(COMMANDS.iter().all(|command| find(command.name.to_uppercase().as_bytes()).is_some()));
}

#[test]
fn values_are_set_and_read() {
    assert_replies(
        &mut Rig::new(),
        &[
            ("GET a", "$-1"),
            ("SET a 1", "+OK"),
            ("get a", "$1 1"),
            ("SET a 2 NX", "$-1"),
            ("SET b 2 XX", "$-1"),
            ("SET a 2 XX GET", "$1 1"),
            ("SET c 3 GET", "$-1"),
            ("SET a 9 NX GET", "$1 2"),
            ("MGET a b c", "*3 $1 2 $-1 $1 3"),
            ("SETNX a 5", ":0"),
            ("SETNX d 5", ":1"),
            ("MSET a 1 b 2", "+OK"),
            ("STRLEN b", ":1"),
            ("STRLEN x", ":0"),
            ("APPEND b 345", ":4"),
            ("APPEND e 1", ":1"),
            ("GET b", "$4 2345"),
            ("EXISTS a a x", ":2"),
            ("DEL a x b", ":2"),
            ("UNLINK c", ":1"),
            ("DBSIZE", ":2"),
            ("FLUSHALL", "+OK"),
            ("FLUSHDB ASYNC", "+OK"),
            ("DBSIZE", ":0"),
        ],
    );
}

#[test]
fn integers_are_changed() {
    assert_replies(
        &mut Rig::new(),
        &[
            ("INCR n", ":1"),
            ("INCRBY n 41", ":42"),
            ("DECR n", ":41"),
            ("DECRBY n -9", ":50"),
            ("GET n", "$2 50"),
            ("SET n 9223372036854775807", "+OK"),
            ("INCR n", "-ERR increment or decrement would overflow"),
            ("DECRBY n -9223372036854775808", "-ERR decrement would overflow"),
            ("INCRBY n x", "-ERR value is not an integer or out of range"),
            ("SET n 01", "+OK"),
            ("INCR n", "-ERR value is not an integer or out of range"),
        ],
    );
}

#[test]
fn values_expire() {
    let mut rig = Rig::new();
    assert_replies(
        &mut rig,
        &[
            ("SET a 1 EX 10", "+OK"),
            ("TTL a", ":10"),
            ("PTTL a", ":10000"),
            ("INCR a", ":2"),
            ("PTTL a", ":10000"),
            ("SET a 1 KEEPTTL", "+OK"),
            ("PTTL a", ":10000"),
            ("SET a 1", "+OK"),
            ("TTL a", ":-1"),
            ("TTL x", ":-2"),
            ("PERSIST a", ":0"),
            ("EXPIRE a 10", ":1"),
            ("PERSIST a", ":1"),
            ("PEXPIRE a 1500", ":1"),
            ("EXPIRE x 10", ":0"),
            ("TTL a", ":2"),
            ("SETEX b 1 v", "+OK"),
            ("SET c v PX 1", "+OK"),
            ("EXPIRE b -1", ":1"),
            ("GET b", "$-1"),
        ],
    );
    rig.now += 1500;
    assert_replies(
        &mut rig,
        &[("GET a", "$-1"), ("EXISTS a", ":0"), ("DBSIZE", ":1"), ("DEL c", ":0"), ("DBSIZE", ":0")],
    );
    assert_replies(
        &mut rig,
        &[
            ("SET a 1 EX 0", "-ERR invalid expire time in 'set' command"),
            ("SET a 1 PX -1", "-ERR invalid expire time in 'set' command"),
            ("SET a 1 EX 9223372036854775807", "-ERR invalid expire time in 'set' command"),
            ("SETEX a 0 v", "-ERR invalid expire time in 'setex' command"),
            ("SET a 1", "+OK"),
            ("EXPIRE a 9223372036854775807", "-ERR invalid expire time in 'expire' command"),
            ("PEXPIRE a 9223372036854775807", "-ERR invalid expire time in 'pexpire' command"),
        ],
    );
}

#[test]
fn errors_have_the_texts_of_redis() {
    assert_replies(
        &mut Rig::new(),
        &[
            ("foo", "-ERR unknown command 'foo', with args beginning with:"),
            ("foo bar 'x y'", "-ERR unknown command 'foo', with args beginning with: 'bar' 'x y'"),
            (
                "averyveryverylongname",
                "-ERR unknown command 'averyveryverylongname', with args beginning with:",
            ),
            ("GET", "-ERR wrong number of arguments for 'get' command"),
            ("GET a b", "-ERR wrong number of arguments for 'get' command"),
            ("MSET a 1 b", "-ERR wrong number of arguments for 'mset' command"),
            ("SET a 1 NX XX", "-ERR syntax error"),
            ("SET a 1 EX 1 PX 1", "-ERR syntax error"),
            ("SET a 1 EX", "-ERR syntax error"),
            ("SET a 1 FOO", "-ERR syntax error"),
            ("SET a 1 EX x", "-ERR value is not an integer or out of range"),
            ("SELECT 1", "-ERR DB index is out of range"),
            ("SELECT x", "-ERR value is not an integer or out of range"),
            ("FLUSHALL NOW", "-ERR syntax error"),
            ("CLIENT foo", "-ERR unknown subcommand 'foo'. Try CLIENT HELP."),
            (
                "CLIENT SETNAME 'a b'",
                "-ERR Client names cannot contain spaces, newlines or special characters.",
            ),
            ("CONFIG SET save x", "-ERR Unknown option or number of arguments for CONFIG SET - 'save'"),
            (
                "CONFIG SET maxmemory x",
                "-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - argument must be a memory value",
            ),
            ("HELLO 4", "-NOPROTO unsupported protocol version"),
            ("HELLO x", "-ERR Protocol version is not an integer or out of range"),
            ("HELLO 3 FOO", "-ERR syntax error"),
            (
                "AUTH x",
                "-ERR AUTH <password> called without any password configured for the default user. Are you sure your \
                 configuration is correct?",
            ),
        ],
    );
}

#[test]
fn connection_commands_reply_as_redis() {
    assert_replies(
        &mut Rig::new(),
        &[
            ("PING", "+PONG"),
            ("PING x", "$1 x"),
            ("ECHO x", "$1 x"),
            ("SELECT 0", "+OK"),
            ("CLIENT ID", ":7"),
            ("CLIENT GETNAME", "$-1"),
            ("CLIENT SETNAME me", "+OK"),
            ("CLIENT GETNAME", "$2 me"),
            ("CLIENT SETINFO LIB-NAME x", "+OK"),
            ("COMMAND DOCS", "*0"),
            ("COMMAND COUNT", ":33"),
            ("CONFIG GET save appendonly", "*4 $10 appendonly $2 no $4 save $0"),
            ("CONFIG GET maxmemory", "*2 $9 maxmemory $7 4194304"),
            ("CONFIG GET nothing", "*0"),
            ("AUTH default x", "+OK"),
        ],
    );
    let mut rig = Rig::new();
    let hello = rig.run("HELLO 3 SETNAME me");
    assert!(
        hello.starts_with("%7 $6 server $10 soft-cache $7 version ") && hello.ends_with("$7 modules *0"),
        "{hello}"
    );
    assert_eq!(rig.run("GET x\nCLIENT GETNAME\nCOMMAND DOCS\nMGET x"), "_ $2 me %0 *1 _");
    assert!(rig.run("HELLO 2").starts_with("*14 "));
    assert_eq!((rig.run("QUIT"), rig.session.is_closing), ("+OK".to_owned(), true));
}

#[test]
fn commands_require_the_password() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    std::fs::write(&path, "secret").unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let password = crate::password::Password::read(&path).unwrap();
    let memory = Memory::constant(64).unwrap();
    let pool = memory.pool().clone();
    let server = Server::new(memory, Some(password), 10).unwrap();
    let mut rig = Rig { pool, server, session: Session::new(1, PEER, false), now: 0 };
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.";
    assert_replies(
        &mut rig,
        &[
            ("GET a", "-NOAUTH Authentication required."),
            ("foo", "-NOAUTH Authentication required."),
            ("AUTH wrong", wrong),
            ("AUTH other secret", wrong),
            ("HELLO 3 AUTH default wrong", wrong),
            ("PING", "-NOAUTH Authentication required."),
            ("AUTH secret", "+OK"),
            ("GET a", "$-1"),
            ("AUTH wrong", wrong),
            ("GET a", "$-1"),
        ],
    );
    rig.session = Session::new(2, PEER, false);
    assert!(rig.run("HELLO 3").starts_with("-NOAUTH HELLO must be called"));
    assert!(rig.run("HELLO 3 AUTH default secret").starts_with("%7 "));
    rig.session = Session::new(3, PEER, false);
    assert_replies(&mut rig, &[("AUTH default secret", "+OK"), ("PING", "+PONG")]);
}

#[test]
fn information_has_all_sections() {
    let mut rig = Rig::new();
    rig.run("SET a 1\nGET a\nGET b");
    let info = rig.run("INFO");
    for part in [
        "# Server redis_version:7.0.0 ",
        "# Clients connected_clients:0 maxclients:10 ",
        "# Memory used_memory:",
        "maxmemory:4194304 maxmemory_policy:allkeys-lru ",
        "# Stats total_connections_received:0 total_commands_processed:4 ",
        "keyspace_hits:1 keyspace_misses:1 ",
        "# Soft_memory soft_daemon:none soft_budget_bytes:4194304 soft_held_bytes:",
        "soft_evicted_values:0 soft_unstored_values:0 soft_reclamations:0 ",
        "# Replication role:master connected_slaves:0 ",
        "# Keyspace db0:keys=1,expires=0,avg_ttl=0",
    ] {
        assert!(info.contains(part), "{part}: {info}");
    }
    let stats = rig.run("INFO soft_memory");
    assert!(stats.contains("# Soft_memory") && !stats.contains("# Stats"), "{stats}");
    assert_eq!(rig.run("INFO nothing"), "$0");
}

#[test]
fn full_memory_evicts_and_too_large_values_are_errors() {
    let mut rig = Rig::with_pages(4);
    for number in 0..1000 {
        assert_eq!(rig.run(&format!("SET key{number} {}", "x".repeat(100))), "+OK");
    }
    assert!(rig.run("GET key0") == "$-1" && rig.run("GET key999").starts_with("$100 "));
    let oom = "-OOM command not allowed when used memory > 'maxmemory'.";
    assert_eq!(rig.run(&format!("SET key0 {}", "x".repeat(5 * 4096))), oom);
    assert!(rig.run("GET key999").starts_with("$100 "));
    assert_eq!(rig.set_long_key(&"k".repeat(65_535)), format!("{oom}\r\n"));
    let too_long = "-ERR string exceeds maximum allowed size (65535 bytes)\r\n";
    assert_eq!(rig.set_long_key(&"k".repeat(65_536)), too_long);
}

#[test]
fn revoked_memory_gives_misses_and_no_errors() {
    let mut rig = Rig::with_pages(256);
    for number in 0..100 {
        rig.run(&format!("SET key{number} value"));
    }
    assert_eq!(rig.pool.revoke(256), 256);
    assert_replies(
        &mut rig,
        &[
            ("GET key1", "$-1"),
            ("MGET key1 key2", "*2 $-1 $-1"),
            ("DBSIZE", ":0"),
            ("SET key1 a", "-OOM command not allowed when used memory > 'maxmemory'."),
            ("DEL key1", ":0"),
            ("TTL key1", ":-2"),
            ("INFO keyspace", "$12 # Keyspace"),
        ],
    );
}

#[test]
fn lines_of_http_requests_close_the_connection_without_a_reply() {
    for line in ["POST / HTTP/1.1", "Host: localhost", "host: x"] {
        let mut rig = Rig::new();
        assert_eq!(rig.run(line), "");
        assert!(rig.session.is_http && rig.session.is_closing, "{line}");
    }
    let mut rig = Rig::new();
    assert_eq!(rig.run("GET host:"), "$-1");
    assert!(!rig.session.is_closing);
}

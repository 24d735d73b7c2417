//! Tests of the cache server with the real programs of Redis.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::process::Signal;
use soft::budget::Settings;
use tests::{
    rack::programs_dir,
    soft_cache::{CacheServer, redis_program},
    soft_daemon::{SoftDaemon, wait_for},
    soft_host::SoftHost,
};
use units::Bytes;

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn redis_cli_reads_and_writes_values() {
    let server = CacheServer::start(&[]);
    assert_eq!(text(&server.cli(&["SET", "key", "a value"])), "OK\n");
    assert_eq!(text(&server.cli(&["GET", "key"])), "a value\n");
    assert_eq!(text(&server.cli(&["-3", "--no-raw", "GET", "missing"])), "(nil)\n");
    assert_eq!(text(&server.cli(&["--no-raw", "INCRBY", "n", "5"])), "(integer) 5\n");
    let hello = text(&server.cli(&["-3", "--no-raw", "HELLO"]));
    assert!(hello.contains("\"proto\" => (integer) 3"), "{hello}");
    let info = text(&server.cli(&["-3", "INFO", "soft_memory"]));
    assert!(info.contains("soft_budget_bytes:67108864"), "{info}");
    assert_eq!(fs::metadata(server.socket()).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn redis_cli_inserts_in_bulk() {
    let server = CacheServer::start(&["--memory", "8MiB"]);
    let commands: String = (0..50_000).map(|number| format!("SET key:{number} value:{number}\r\n")).collect();
    let mut command = Command::new(redis_program("redis-cli"));
    command.arg("-s").arg(server.socket()).arg("--pipe").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut pipe = command.spawn().unwrap();
    std::io::Write::write_all(&mut pipe.stdin.take().unwrap(), commands.as_bytes()).unwrap();
    let report = text(&pipe.wait_with_output().unwrap());
    assert!(report.ends_with("errors: 0, replies: 50000\n"), "{report}");
    assert_eq!(text(&server.cli(&["GET", "key:49999"])), "value:49999\n");
}

#[test]
fn redis_benchmark_completes_without_errors() {
    let server = CacheServer::start(&["--memory", "4MiB", "--listen", "127.0.0.1:0"]);
    let tests = ["-q", "-c", "50", "-n", "20000", "-r", "100000", "-t", "ping,set,get,incr,mset"];
    for (options, data) in [(["-P", "1"], "3"), (["-P", "16"], "1000")] {
        let report = server.benchmark(&[&tests[..], &options, &["-d", data]].concat());
        let report = text(&report);
        for test in ["PING_INLINE", "PING_MBULK", "SET", "GET", "INCR", "MSET (10 keys)"] {
            assert!(report.contains(&format!("{test}: ")), "{report}");
        }
        assert!(!report.to_lowercase().contains("error"), "{report}");
    }
    assert!(server.info("evicted_keys") > 0);
    assert_eq!(server.info("rejected_connections"), 0);
}

/// Commands whose replies are compared with those of Redis, without commands that describe the server itself.
const COMPARED_COMMANDS: &str = include_str!("soft_cache/compared_commands.txt");

#[test]
fn replies_are_equal_to_those_of_redis() {
    let (server, redis) = (CacheServer::start(&[]), CacheServer::start_redis());
    for protocol in [2, 3] {
        let (mut ours, mut theirs) = (server.connect(), redis.connect());
        for client in [&mut ours, &mut theirs] {
            client.run(format!("HELLO {protocol}\r\nFLUSHALL\r\n").as_bytes());
        }
        let mut compared = 0;
        for line in COMPARED_COMMANDS.lines().filter(|line| !line.is_empty()) {
            let command = format!("{line}\r\n");
            assert_eq!(
                ours.run(command.as_bytes()),
                theirs.run(command.as_bytes()),
                "RESP{protocol}: {line}"
            );
            compared += 1;
        }
        assert!(compared > 100, "{compared} commands");
    }
}

#[test]
fn protocol_errors_are_equal_to_those_of_redis() {
    let (server, redis) = (CacheServer::start(&[]), CacheServer::start_redis());
    let before = server.peak_resident_kib();
    for request in [
        "*-5000000000000000000000\r\n",
        "*one\r\n",
        "*1\r\n$1000000000\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n$one\r\n",
        "*1\r\n*1\r\n*1\r\n*1\r\n",
        "*1\r\n:1\r\n",
        "echo \"unbalanced\r\n",
        "PING\r\n*1\r\n!\r\n",
    ] {
        let received = |server: &CacheServer| {
            let mut client = server.connect();
            client.send(request.as_bytes()).unwrap();
            String::from_utf8(client.receive_to_end()).unwrap()
        };
        assert_eq!(received(&server), received(&redis), "{request:?}");
    }
    // Redis waits for the arguments.
    let mut client = server.connect();
    client.send(b"*1000000000\r\n").unwrap();
    let error = String::from_utf8(client.receive_to_end()).unwrap();
    assert_eq!(error, "-ERR Protocol error: invalid multibulk length\r\n");
    let mut client = server.connect();
    // The server may close the connection before it received everything.
    let _ = client.send(&vec![b'x'; 1 << 20]);
    client.receive_to_end();
    assert_eq!(server.info("closed_connections"), 11);
    assert!(server.peak_resident_kib() < before + (16 << 10), "{before} KiB before");
}

#[test]
fn many_declared_sizes_allocate_no_memory() {
    let server = CacheServer::start(&[]);
    let before = server.peak_resident_kib();
    let clients: Vec<_> = (0..200)
        .map(|_| {
            let mut client = server.connect();
            client.send(b"*60000\r\n$3\r\nSET\r\n$16777216\r\nabc").unwrap();
            client
        })
        .collect();
    assert_eq!(text(&server.cli(&["PING"])), "PONG\n");
    assert_eq!(server.info("connected_clients"), 201);
    assert!(server.peak_resident_kib() < before + (16 << 10), "{before} KiB before");
    drop(clients);
}

#[test]
fn replies_above_the_limit_close_the_connection() {
    let server = CacheServer::start(&[]);
    server.connect().run(format!("SET key {}\r\n", "x".repeat(60_000)).as_bytes());
    let mut client = server.connect();
    client.send(format!("MGET{}\r\n", " key".repeat(10_000)).as_bytes()).unwrap();
    assert_eq!(client.receive_to_end(), b"");
    assert_eq!(server.info("closed_connections"), 1);
    assert!(server.peak_resident_kib() < 128 << 10);
}

#[test]
fn client_that_does_not_read_is_bounded_and_closed() {
    let mut server = CacheServer::start(&[]);
    server.connect().run(format!("SET key {}\r\n", "x".repeat(60_000)).as_bytes());
    let mut client = server.connect();
    client.send("GET key\r\n".repeat(5000).as_bytes()).unwrap();
    // Other clients are served meanwhile.
    assert_eq!(text(&server.cli(&["STRLEN", "key"])), "60000\n");
    assert!(server.info("mem_clients_normal") < 1 << 20);
    server.wait_for_info("closed_connections", 1);
    server.terminate();
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("the client did not read its replies in time"), "{log}");
}

#[test]
fn clients_above_the_limit_are_rejected() {
    let server = CacheServer::start(&["--max-clients", "2"]);
    let (mut first, mut second) = (server.connect(), server.connect());
    assert_eq!((first.run(b""), second.run(b"")), (String::new(), String::new()));
    let reply = server.connect().receive_to_end();
    assert_eq!(String::from_utf8_lossy(&reply), "-ERR max number of clients reached\r\n");
    drop(second);
    // The server notices the end of the second connection at some time.
    let quit = || {
        let mut client = server.connect();
        // The server may close the connection before it reads.
        let _ = client.send(b"QUIT\r\n");
        client.receive_to_end()
    };
    while quit() != b"+OK\r\n" {}
}

#[test]
fn password_is_required_from_all_clients() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    fs::write(&file, "secret\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let mut server = CacheServer::start(&["--password-file", file.to_str().unwrap()]);
    assert_eq!(text(&server.cli(&["GET", "key"])), "NOAUTH Authentication required.\n\n");
    assert_eq!(text(&server.cli(&["--no-auth-warning", "-a", "secret", "SET", "key", "1"])), "OK\n");
    assert_eq!(text(&server.cli(&["--no-auth-warning", "-a", "secret", "-3", "GET", "key"])), "1\n");
    let mut client = server.connect();
    client.send(b"*100\r\n").unwrap();
    let error = String::from_utf8(client.receive_to_end()).unwrap();
    assert_eq!(error, "-ERR Protocol error: unauthenticated multibulk length\r\n");
    assert!(text(&server.cli(&["AUTH", "wrong"])).starts_with("WRONGPASS"));
    server.terminate();
    let (_, log) = server.wait();
    let has_line = |reason: &str| log.lines().any(|line| line.contains(" (pid ") && line.contains(reason));
    assert!(has_line("wrong user or password") && has_line("unauthenticated multibulk length"), "{log}");
}

#[test]
fn wrong_options_are_rejected_with_the_reason() {
    for (options, expected) in [
        (
            "--listen 0.0.0.0:0",
            "error: --listen: 0.0.0.0:0 is not a loopback address: requires --password-file\n",
        ),
        (
            "--unix-socket /nowhere/socket",
            "error: --unix-socket: cannot listen on /nowhere/socket: No such file or directory",
        ),
        (
            "--password-file /nowhere",
            "error: --password-file: cannot read /nowhere: No such file or directory",
        ),
    ] {
        let mut command = Command::new(programs_dir().join("soft-cache"));
        let output = command.args(options.split_whitespace()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.starts_with(expected), "{error}");
    }
}

#[test]
fn sigterm_ends_the_server_after_the_replies() {
    let mut server = CacheServer::start(&["--listen", "127.0.0.1:0"]);
    let mut client = server.connect();
    assert_eq!(client.run(b"SET key value\r\n"), "+OK\r\n");
    server.terminate();
    assert_eq!(client.receive_to_end(), b"");
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("stopping"), "{log}");
    assert!(!server.socket().exists());
}

#[test]
fn halved_memory_causes_misses_but_no_errors() {
    let server = CacheServer::start(&["--memory", "32MiB"]);
    let is_done = AtomicBool::new(false);
    let value = "v".repeat(500);
    let errors = std::thread::scope(|scope| {
        let (server, is_done, value) = (&server, &is_done, &value);
        let load = |start: u64| {
            move || {
                let (mut client, mut number, mut errors) = (server.connect(), start, 0);
                while !is_done.load(Ordering::Relaxed) {
                    let commands: String = (number..number + 50)
                        .map(|key| {
                            format!("SET key:{} {value}\r\nGET key:{}\r\n", key % 100_000, key * 7 % 100_000)
                        })
                        .collect();
                    errors +=
                        client.run(commands.as_bytes()).lines().filter(|line| line.starts_with('-')).count();
                    number += 50;
                }
                errors
            }
        };
        let clients: Vec<_> = (0..4).map(|client| scope.spawn(load(client * 25_000))).collect();
        server.wait_for_info("soft_held_bytes", 30 << 20);
        assert_eq!(text(&server.cli(&["CONFIG", "SET", "maxmemory", "16mb"])), "OK\n");
        while server.info("soft_held_bytes") > 16 << 20 {}
        let evicted = server.info("evicted_keys");
        server.wait_for_info("evicted_keys", evicted + 1000);
        assert!(server.info("soft_held_bytes") <= 16 << 20);
        assert_eq!(text(&server.cli(&["CONFIG", "SET", "maxmemory", "32mb"])), "OK\n");
        server.wait_for_info("soft_held_bytes", 30 << 20);
        is_done.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).sum::<usize>()
    });
    assert_eq!(errors, 0);
    assert!(server.info("soft_reclamations") > 0 && server.info("keyspace_misses") > 0);
    let error = text(&server.cli(&["CONFIG", "SET", "maxmemory", "33mb"]));
    assert!(error.contains("argument must be between 4096 and 33554432"), "{error}");
}

#[test]
fn expired_values_are_removed_in_the_background() {
    let server = CacheServer::start(&[]);
    let commands: String = (0..1000).map(|key| format!("SET key:{key} value PX 1\r\n")).collect();
    server.connect().run(commands.as_bytes());
    server.connect().run(b"SET other value\r\n");
    server.wait_for_info("expired_keys", 1000);
    assert_eq!(text(&server.cli(&["DBSIZE"])), "1\n");
}

/// Sets values of this length in new keys. No command fails.
fn fill(cache: &CacheServer, prefix: &str, keys: u32, value_bytes: usize) {
    const BATCH: u32 = 1000;
    let mut client = cache.connect();
    let value = "v".repeat(value_bytes);
    for first in (0..keys).step_by(BATCH as usize) {
        let numbers = first..(first + BATCH).min(keys);
        let commands: String = numbers.clone().map(|n| format!("SET {prefix}{n} {value}\r\n")).collect();
        assert_eq!(client.run(commands.as_bytes()), "+OK\r\n".repeat(numbers.len()));
    }
}

/// Returns a SET command with a value of this length.
fn set_command(key: &str, value_bytes: usize) -> Vec<u8> {
    let start = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${value_bytes}\r\n", key.len());
    [start.into_bytes(), vec![b'v'; value_bytes], b"\r\n".to_vec()].concat()
}

#[tokio::test]
async fn other_clients_are_served_while_a_set_waits_for_the_stopped_agent() {
    const LARGE_VALUE_BYTES: usize = 4 << 20;
    let host = SoftHost::start(64).await;
    let socket = host.socket();
    let cache = CacheServer::start(&["--memory", "64MiB", "--daemon", socket.to_str().unwrap()]);
    let (mut reader, mut writer) = (cache.connect(), cache.connect());
    assert_eq!(reader.run(b"SET small value\r\n"), "+OK\r\n");
    host.rack.signal_agent(0, Signal::STOP);
    writer.send(&set_command("large", LARGE_VALUE_BYTES)).unwrap();
    // The server keeps the complete command until the daemon has answered.
    let buffered = |info: &str| -> usize {
        let line = info.lines().find_map(|line| line.strip_prefix("mem_clients_normal:"));
        line.unwrap().trim().parse().unwrap()
    };
    loop {
        assert_eq!(reader.run(b"GET small\r\n"), "$5\r\nvalue\r\n");
        if buffered(&reader.run(b"INFO memory\r\n")) > LARGE_VALUE_BYTES {
            break;
        }
        assert!(!writer.has_reply());
    }
    assert_eq!(reader.run(b"GET small\r\n"), "$5\r\nvalue\r\n");
    assert!(!writer.has_reply(), "the reader does not wait for the writer");
    // When the answer is overdue, values are evicted for new ones. No command fails.
    assert_eq!(writer.run(b""), "+OK\r\n", "a value without budget is evicted at once");
    assert_eq!((reader.run(b"GET large\r\n"), cache.info("soft_unstored_values")), ("$-1\r\n".to_owned(), 1));
    fill(&cache, "pair:", 3000, 1000);
    assert!(cache.info("evicted_keys") > 0);
    host.rack.signal_agent(0, Signal::CONT);
    wait_for(|| {
        let mut client = cache.connect();
        client.run(&set_command("large", LARGE_VALUE_BYTES));
        (client.run(b"STRLEN large\r\n") == format!(":{LARGE_VALUE_BYTES}\r\n")).then_some(())
    });
    assert!(cache.info("soft_budget_bytes") >= 4 << 20);
}

/// The paper's figure 2 with caches as both processes: 10 MiB and 12 MiB of 20 MiB.
#[test]
fn caches_trade_memory_through_the_daemon_as_their_load_turns() {
    const MIB: u64 = 1 << 20;
    let settings = Settings { over_reclaim_percent: 0, ..Settings::default() };
    let daemon = SoftDaemon::start(Bytes::mib(20), settings);
    let socket = daemon.socket();
    let options = ["--memory", "64MiB", "--daemon", socket.to_str().unwrap()];
    let (first, second) = (CacheServer::start(&options), CacheServer::start(&options));
    let held = |cache: &CacheServer| cache.info("used_memory");
    // A key and its value need 80 bytes.
    fill(&first, "pair:", 130_000, 64);
    let before = held(&first);
    assert!((10 * MIB..13 * MIB).contains(&before), "{before}");
    assert_eq!((first.info("evicted_keys"), text(&first.cli(&["DBSIZE"]))), (0, "130000\n".to_owned()));

    fill(&second, "large:", 12 * 1024, 1000);
    assert_eq!(text(&second.cli(&["DBSIZE"])), "12288\n", "all values are present");
    assert!(held(&second) >= 12 * MIB && held(&first) + held(&second) <= 20 * MIB);
    assert!(held(&first) < before && first.info("evicted_keys") > 0);
    assert_eq!(text(&first.cli(&["GET", "pair:0"])), "\n", "the oldest value is a miss");
    assert_eq!(text(&first.cli(&["GET", "pair:129999"])).len(), 65, "the latest value is present");

    // The load turns.
    let before = held(&second);
    fill(&first, "new:", 130_000, 64);
    assert!(held(&second) < before && second.info("evicted_keys") > 0);
    assert_eq!(text(&first.cli(&["GET", "new:129999"])).len(), 65);
    let report = daemon.next_report();
    let budgets: u64 = report.clients.iter().map(|client| client.state.sample.budget).sum();
    assert_eq!((report.client_count, report.free.get() + budgets * 4096), (2, 20 * MIB));
    let error = text(&first.cli(&["CONFIG", "SET", "maxmemory", "1mb"]));
    assert!(error.contains("the soft memory daemon determines the budget"), "{error}");
}

#[test]
fn caches_that_write_at_once_through_the_daemon_have_no_errors() {
    const KEYS: u32 = 100_000;
    let daemon = SoftDaemon::start(Bytes::mib(32), Settings::default());
    let socket = daemon.socket();
    let options = ["--memory", "64MiB", "--daemon", socket.to_str().unwrap()];
    let caches = [CacheServer::start(&options), CacheServer::start(&options)];
    // A value and its key fill a quarter of a page, so each cache writes more than the soft memory of the host.
    std::thread::scope(|scope| {
        for cache in &caches {
            scope.spawn(|| fill(cache, "key:", KEYS, 1000));
            scope.spawn(|| fill(cache, "other:", KEYS / 4, 100));
        }
    });
    let held: Vec<_> = caches.iter().map(|cache| cache.info("used_memory")).collect();
    assert!(held.iter().sum::<u64>() <= 32 << 20, "{held:?}");
    for cache in &caches {
        assert!(cache.info("evicted_keys") > 0);
    }
}

#[test]
fn values_without_budget_are_evicted_at_once() {
    let daemon = SoftDaemon::start(Bytes::ZERO, Settings::default());
    let socket = daemon.socket();
    let cache = CacheServer::start(&["--memory", "16MiB", "--daemon", socket.to_str().unwrap()]);
    let mut client = cache.connect();
    for (commands, replies) in [
        ("SET a 1\r\n", "+OK\r\n"),
        ("GET a\r\n", "$-1\r\n"),
        ("INCR n\r\nINCR n\r\n", ":1\r\n:1\r\n"),
        ("APPEND s abc\r\n", ":3\r\n"),
        ("MSET a 1 b 2\r\n", "+OK\r\n"),
        ("SETNX a 1\r\nEXISTS a\r\n", ":1\r\n:0\r\n"),
    ] {
        assert_eq!(client.run(commands.as_bytes()), replies, "{commands}");
    }
    assert_eq!((cache.info("soft_unstored_values"), cache.info("evicted_keys")), (7, 7));
    client.send(&set_command("large", 16 << 20)).unwrap();
    assert_eq!(client.receive(4), "-OOM", "the value exceeds the largest budget");
}

#[test]
fn value_that_needs_the_largest_budget_of_the_process_is_stored() {
    // 8 of 32 MiB.
    let settings = Settings { client_pages_max: 2048, ..Settings::default() };
    let daemon = SoftDaemon::start(Bytes::mib(32), settings);
    let socket = daemon.socket();
    let cache = CacheServer::start(&["--memory", "16MiB", "--daemon", socket.to_str().unwrap()]);
    assert_eq!(cache.info("maxmemory"), 8 << 20);
    fill(&cache, "key:", 3000, 1000);
    let mut client = cache.connect();
    for (key, bytes) in [("large", 5_000_000), ("larger", 7_000_000)] {
        client.send(&set_command(key, bytes)).unwrap();
        assert_eq!(client.receive(5), "+OK\r\n");
        assert_eq!(client.run(format!("STRLEN {key}\r\n").as_bytes()), format!(":{bytes}\r\n"));
    }
    assert_eq!(cache.info("soft_unstored_values"), 0);
    client.send(&set_command("huge", 9 << 20)).unwrap();
    assert_eq!(client.receive(4), "-OOM", "the value exceeds the largest budget");
}

#[test]
fn lost_connection_to_the_daemon_is_logged_and_in_info() {
    let mut daemon = SoftDaemon::start(Bytes::mib(8), Settings::default());
    let socket = daemon.socket();
    let mut cache = CacheServer::start(&["--daemon", socket.to_str().unwrap()]);
    let wait_for_state = |cache: &CacheServer, state: &str| {
        let field = format!("soft_daemon:{state}\r\n");
        wait_for(|| cache.connect().run(b"INFO soft_memory\r\n").contains(&field).then_some(()));
    };
    wait_for_state(&cache, "connected");
    daemon.stop();
    wait_for_state(&cache, "disconnected");
    daemon.restart(Bytes::mib(8));
    wait_for_state(&cache, "connected");
    cache.terminate();
    let (_, log) = cache.wait();
    let lines = ["lost the connection to the soft memory daemon", "connected to the soft memory daemon"];
    let positions = lines.map(|line| log.find(line));
    assert!(positions[0].is_some() && positions[0] < positions[1], "{log}");
}

#[test]
fn http_requests_execute_no_commands() {
    let mut server = CacheServer::start(&[]);
    for head in ["POST / HTTP/1.1", "GET / HTTP/1.1\r\nHost: localhost"] {
        let mut client = server.connect();
        client.send(format!("{head}\r\n\r\nSET attack 1\r\n").as_bytes()).unwrap();
        client.receive_to_end();
    }
    assert_eq!(text(&server.cli(&["EXISTS", "attack"])), "0\n");
    assert_eq!(server.info("closed_connections"), 2);
    server.terminate();
    let (_, log) = server.wait();
    assert!(log.contains("possible attack: the client sent an HTTP request"), "{log}");
}

#[test]
fn client_that_sends_a_too_large_value_receives_the_error() {
    let server = CacheServer::start(&[]);
    let mut client = server.connect();
    client.send(&set_command("large", (16 << 20) + 1)).unwrap();
    assert_eq!(client.receive_to_end(), b"-ERR Protocol error: invalid bulk length\r\n");
    assert_eq!(server.info("closed_connections"), 1);
}

#[test]
fn socket_of_another_server_is_not_removed() {
    let mut server = CacheServer::start(&[]);
    fs::remove_file(server.socket()).unwrap();
    fs::write(server.socket(), "other").unwrap();
    server.terminate();
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("cannot remove the socket"), "{log}");
    assert_eq!(fs::read(server.socket()).unwrap(), b"other");
}

//! Tests of errors, hints and exit codes.

use std::{fs, path::Path, time::Duration};

use tempfile::TempDir;
use tokio::net::TcpListener;
use tonic::Code;

use crate::rack::{Rack, RackBehavior, command, tarn};

/// Expected exit code for each gRPC status code, as documented in `tarn --help`.
const EXIT_CODES: [(Code, i32); 16] = [
    (Code::Cancelled, 1),
    (Code::Unknown, 1),
    (Code::InvalidArgument, 2),
    (Code::DeadlineExceeded, 124),
    (Code::NotFound, 3),
    (Code::AlreadyExists, 4),
    (Code::PermissionDenied, 1),
    (Code::ResourceExhausted, 5),
    (Code::FailedPrecondition, 4),
    (Code::Aborted, 4),
    (Code::OutOfRange, 1),
    (Code::Unimplemented, 1),
    (Code::Internal, 1),
    (Code::Unavailable, 6),
    (Code::DataLoss, 1),
    (Code::Unauthenticated, 1),
];

#[tokio::test(flavor = "multi_thread")]
async fn statuses_have_their_documented_exit_codes() {
    for (code, exit) in EXIT_CODES {
        let ran = Rack::new(RackBehavior::Rejecting(code, "SOME_REASON", "no")).tarn("get rack").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (exit, ""), "{code:?}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: no (SOME_REASON)\n"), "{code:?}: {}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rejection_has_a_reason_and_a_hint() {
    let rejecting = RackBehavior::Rejecting(
        Code::ResourceExhausted,
        "OUT_OF_SLICES",
        "host h1 can reach 3 free slices, 4 are needed",
    );
    let arguments = "reserve --host h1 --vm web --pool 4GiB --request-id q1";
    let ran = Rack::new(rejecting.clone()).tarn(arguments).await;
    let output = "\
error: host h1 can reach 3 free slices, 4 are needed (OUT_OF_SLICES)
hint: show free slices with `tarn watch capacity`; draining slices become free without intervention
";
    assert_eq!((ran.stderr.as_str(), ran.code), (output, 5));
    let ran = Rack::new(rejecting).tarn(&format!("{arguments} -o json")).await;
    let output: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!((&output["reason"], &output["exit_code"]), (&"OUT_OF_SLICES".into(), &5.into()));
    assert!(output["hint"].as_str().unwrap().contains("watch capacity") && output["error"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn error_about_unknown_name_lists_existing_names() {
    let cases = [
        (
            "describe host h11",
            "error: host h11 is not in this rack (HOST_NOT_FOUND)\nhint: did you mean h1? available hosts: h1, h2\n",
        ),
        (
            "get emcs far-away",
            "error: emc far-away is not in this rack (EMC_NOT_FOUND)\nhint: available EMCs: e0, e1\n",
        ),
        (
            "set weights h3 web=2",
            "error: host h3 is not in this rack (HOST_NOT_FOUND)\nhint: did you mean h1? available hosts: h1, h2\n",
        ),
        (
            "get shares far-away",
            "error: host far-away is not in this rack (HOST_NOT_FOUND)\nhint: available hosts: h1, h2\n",
        ),
        (
            "explain shares far-away",
            "error: host far-away is not in this rack (HOST_NOT_FOUND)\nhint: available hosts: h1, h2\n",
        ),
        (
            "describe vm wbe",
            "error: vm wbe has no reservation (VM_NOT_FOUND)\nhint: did you mean web? available VMs: web\n",
        ),
    ];
    for (arguments, output) in cases {
        let ran = Rack::default().tarn(arguments).await;
        assert_eq!((ran.stderr.as_str(), ran.code), (output, 3), "tarn {arguments}");
    }
    let ran = Rack::default().tarn("describe slice 99").await;
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let ran = Rack::default().tarn("get shares h2").await;
    assert!(
        ran.code == 3 && ran.stderr.contains("(SHARES_NOT_REPORTED)\nhint: the host's agent reports shares"),
        "{}",
        ran.stderr
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_manager_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unused_address = listener.local_addr().unwrap();
    drop(listener);
    let ran = tarn(&format!("--endpoint http://{unused_address} get rack")).await;
    assert_eq!(ran.code, 6, "{}", ran.stderr);
    assert!(
        ran.stderr
            .contains(&format!("cannot reach a pool manager at http://{unused_address}: Connection refused"))
    );
    assert!(ran.stderr.contains("hint: check that pool-manager is running"), "{}", ran.stderr);
    let ran = tarn(&format!("--endpoint http://{unused_address} doctor")).await;
    assert_eq!(ran.code, 1, "`tarn doctor` reports the missing manager as a problem: {}", ran.stderr);
    assert!(ran.stdout.contains("cannot reach a pool manager"), "{}", ran.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn manager_that_closes_the_connection_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            connection.readable().await.unwrap();
            drop(connection);
        }
    });
    let ran = tarn(&format!("--endpoint http://{address} get rack")).await;
    assert_eq!(ran.code, 6, "{}", ran.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn unresponsive_manager_times_out() {
    for arguments in [
        "get rack",
        "commit web",
        "reserve --host h1 --vm v --pool 1GiB --request-id q --wait-ready",
        "watch",
    ] {
        let ran = Rack::new(RackBehavior::Unresponsive).tarn(&format!("--timeout 100ms {arguments}")).await;
        assert_eq!(ran.code, 124, "tarn {arguments}: {}", ran.stderr);
        assert!(ran.stderr.contains("within 100ms"), "{}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn list_without_a_last_page_is_an_error() {
    for arguments in ["get slices", "get reservations"] {
        let ran = Rack::new(RackBehavior::EndlessLists).tarn(arguments).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "tarn {arguments}: {}", ran.stderr);
        assert!(ran.stderr.contains("has no end"), "tarn {arguments}: {}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_arguments_are_not_sent_to_the_manager() {
    let invalid = [
        "release web --force",
        "reserve --host h1 --pool 1GiB",
        "reserve --host h1 --vm web --pool 1gb",
        "reserve --host h1 --vm web --pool 1GiB --validate-only --wait-ready",
        "reserve --host ../h1 --vm web --pool 1GiB",
        "cordon slice 3",
        "get slices seven",
        "get nothing",
        "get shares",
        "describe shares h1",
        "set weights h1",
        "set weights h1 web",
        "set weights h1 web=much",
        "set weights h1 =2",
        "set weights h1 a/b=2",
        "--timeout 0s get rack",
        "--timeout soon get rack",
        "top",
    ];
    for arguments in invalid {
        let rack = Rack::default();
        let ran = rack.tarn(arguments).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "tarn {arguments}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: "), "tarn {arguments}: {}", ran.stderr);
        assert_eq!(rack.requests(), Vec::<String>::new(), "tarn {arguments}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_error_is_printed_as_json_on_request() {
    for arguments in ["release web --force -o json", "get --output=json nothing", "-ojson reserve --pool 1gb"]
    {
        let ran = tarn(arguments).await;
        let output: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON on stderr");
        assert!(
            ran.code == 2 && output["exit_code"] == 2 && output["error"].is_string(),
            "tarn {arguments}: {output}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_endpoint_is_a_usage_error() {
    for arguments in [
        "--endpoint 127.0.0.1:9750",
        "--endpoint ftp://x",
        "--endpoint unix:",
        "--endpoint unix://",
        "--ca /x --endpoint http://127.0.0.1:1",
        "--endpoint https://h",
    ] {
        let ran = tarn(&format!("{arguments} get rack")).await;
        assert_eq!(ran.code, 2, "{arguments}: {}", ran.stderr);
    }
    let ran = tarn("--endpoint https://h --ca /no/such/file get rack").await;
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr.starts_with("error: cannot read /no/such/file: No such file or directory"),
        "{}",
        ran.stderr
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rejection_names_the_subject_and_the_option() {
    let rejecting = RackBehavior::Rejecting(Code::AlreadyExists, "VM_ALREADY_RESERVED", "vm web has memory");
    let ran = Rack::new(rejecting).tarn("reserve --host h1 --vm web --pool 1GiB --request-id q1").await;
    let hint =
        "hint: show its reservation with `tarn describe vm web`, or release it with `tarn release web`\n";
    assert!(ran.stderr.ends_with(hint), "{}", ran.stderr);
    let rejecting = RackBehavior::Rejecting(
        Code::InvalidArgument,
        "BAD_VALUE",
        "pool_bytes: 1610612736 must be whole slices",
    );
    let ran = Rack::new(rejecting).tarn("reserve --host h1 --vm web --pool 1536MiB --request-id q1").await;
    assert_eq!(ran.stderr, "error: --pool: 1536MiB must be whole slices (BAD_VALUE)\n");
}

/// Creates a file of zeros that takes no space on disk.
fn create_sparse_file(path: &Path, bytes: u64) {
    fs::File::create(path).unwrap().set_len(bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_must_be_small_regular_files() {
    let folder = TempDir::new().unwrap();
    let large = folder.path().join("large");
    create_sparse_file(&large, 64 << 20);
    let large = large.display();
    let local = "--endpoint http://127.0.0.1:1";
    let tls = "--endpoint https://127.0.0.1:1";
    let ca = format!("{}/ca.pem", folder.path().display());
    fs::write(&ca, "").unwrap();
    let options = [
        ("--token-file", local.to_owned(), 4096),
        ("--ca", tls.to_owned(), 1 << 20),
        ("--cert", format!("{tls} --ca {ca} --key {ca}"), 1 << 20),
        ("--key", format!("{tls} --ca {ca} --cert {ca}"), 1 << 20),
    ];
    for (option, others, max) in options {
        let ran = tarn(&format!("{others} {option} {large} get rack")).await;
        let message = format!("error: {option}: \"{large}\" must have at most {max} bytes\n");
        assert_eq!((ran.stderr, ran.code), (message, 2));
        for special in ["/dev/null", "/dev"] {
            let ran = tarn(&format!("{others} {option} {special} get rack")).await;
            let message = format!("error: {option}: \"{special}\" must be a regular file\n");
            assert_eq!((ran.stderr, ran.code), (message, 2));
        }
    }
    let fifo = folder.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    let mut blocked = command(&format!("{local} --token-file {} get rack", fifo.display()));
    let output = tokio::time::timeout(Duration::from_secs(20), blocked.kill_on_drop(true).output()).await;
    let stderr = String::from_utf8(output.expect("opening a pipe does not block").unwrap().stderr).unwrap();
    assert!(stderr.ends_with("must be a regular file\n"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_lines_and_large_files_are_rejected() {
    let folder = TempDir::new().unwrap();
    let large = folder.path().join("large.csv");
    create_sparse_file(&large, 64 << 20);
    let large = large.display();
    let line = "line 1 is longer than 1048576 bytes";
    for (arguments, problem) in [
        (format!("telemetry import --format csv {large}"), line),
        (format!("replay {large}"), line),
        (format!("evaluate frigid --format csv --test {large}"), line),
        (format!("evaluate sensitivity --labels {large}"), line),
        (format!("evaluate symbiosis --traces {}", folder.path().display()), line),
        (format!("replay generated --rack {large}"), "longer than 1048576 bytes"),
        (format!("import-model frigid --format tarn {large}"), "longer than 3145728 bytes"),
    ] {
        let command = if arguments.starts_with("replay generated") {
            tarn(&arguments).await
        } else {
            Rack::default().tarn(&arguments).await
        };
        assert_eq!(command.code, 1, "tarn {arguments}: {}", command.stderr);
        assert!(command.stderr.contains(problem), "tarn {arguments}: {}", command.stderr);
        assert!(command.stderr.starts_with("error: cannot read "), "tarn {arguments}: {}", command.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_out_of_range_are_rejected_with_the_limits() {
    for command in ["plan-vm --vm new --memory 8GiB", "reserve --host h1 --vm web"] {
        for cores in ["-1", "4097", "99999999999999999999", "1.5", "many"] {
            let ran = tarn(&format!("{command} --cores={cores}")).await;
            let message = format!(
                "error: invalid value '{cores}' for '--cores <CORES>': must be a whole number from 0 to 4096\n"
            );
            assert!(ran.code == 2 && ran.stderr.starts_with(&message), "{}", ran.stderr);
        }
    }
    let ran = tarn("reserve --host h1 --vm web --pool 99999999TiB").await;
    let message =
        "error: invalid value '99999999TiB' for '--pool <SIZE>': too large: must be less than 16777216TiB\n";
    assert!(ran.code == 2 && ran.stderr.starts_with(message), "{}", ran.stderr);
    for uid in ["-1", "4294967295"] {
        let ran = tarn(&format!("reserve --host h1 --vm web --uid={uid}")).await;
        let message = format!("error: invalid value '{uid}' for '--uid <UID>': not in 0..4294967295\n");
        assert!(ran.code == 2 && ran.stderr.starts_with(&message), "{}", ran.stderr);
    }
    let ran = tarn("reserve --host h1 --vm web --commit-within 25").await;
    assert!(ran.code == 2 && ran.stderr.contains("must be a duration such as 500ms"), "{}", ran.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_error_shows_a_value_once_escaped_and_shortened() {
    let run = async |arguments: &str, last: &str| {
        let output = command(arguments).arg(last).output().await.unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let reserve = "reserve --host h1 --vm web --pool 1GiB --request-id";
    assert_eq!(
        run(reserve, "a\n\nb").await,
        "error: invalid value 'a\\n\\nb' for '--request-id <ID>': not a name: must be 1 to 128 of A-Z a-z 0-9 . _ : - \
         and not begin with a dot or dash\n\nFor more information, try '--help'.\n"
    );
    let long = "x".repeat(3000);
    let shown = format!("error: invalid value '{}…' for '--request-id <ID>': not a name", "x".repeat(256));
    let stderr = run(reserve, &long).await;
    assert!(stderr.starts_with(&shown) && stderr.len() < 600, "{stderr}");
    let stderr = run("-o json --timeout", &format!("a\n\n{long}")).await;
    let report: serde_json::Value = serde_json::from_str(&stderr).unwrap();
    let error = report["error"].as_str().unwrap();
    assert!(error.ends_with("such as 500ms, 30s or 5m") && error.len() < 600, "{error}");
    for (arguments, last) in
        [("", format!("a\nb{long}")), ("get rack", format!("--a\nb{long}")), ("watch", format!("a\nb{long}"))]
    {
        let stderr = run(arguments, &last).await;
        assert!(stderr.contains("a\\nbxxx") && stderr.contains("xxx…'"), "{stderr}");
        assert!(stderr.matches('x').count() < 2 * 256, "the value is shown once: {stderr}");
    }
}

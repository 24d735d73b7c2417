//! What failures look like to people and to scripts.

use tokio::net::TcpListener;
use tonic::Code;

use crate::rack::{Mood, Rack, tarn};

/// The exit codes that `tarn --help` promises, one for each way a manager can refuse.
const PROMISED: [(Code, i32); 16] = [
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
async fn every_refusal_has_the_exit_code_that_help_promises() {
    for (code, exit) in PROMISED {
        let ran = Rack::new(Mood::Refusing(code, "SOME_REASON", "no")).tarn("get rack").await;
        assert_eq!((ran.code, ran.stdout.as_str()), (exit, ""), "{code:?}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: no (SOME_REASON)\n"), "{code:?}: {}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_says_why_and_what_to_do_next() {
    let mood = Mood::Refusing(
        Code::ResourceExhausted,
        "OUT_OF_SLICES",
        "host h1 can reach 3 free slices, 4 are needed",
    );
    let words = "reserve --host h1 --vm web --pool 4GiB --request-id q1";
    let ran = Rack::new(mood.clone()).tarn(words).await;
    let said = "\
error: host h1 can reach 3 free slices, 4 are needed (OUT_OF_SLICES)
hint: `tarn watch capacity` shows where slices are free; draining ones come back by themselves
";
    assert_eq!((ran.stderr.as_str(), ran.code), (said, 5));
    let ran = Rack::new(mood).tarn(&format!("{words} -o json")).await;
    let said: serde_json::Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!((&said["reason"], &said["exit_code"]), (&"OUT_OF_SLICES".into(), &5.into()));
    assert!(said["hint"].as_str().unwrap().contains("watch capacity") && said["error"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_name_is_answered_with_those_that_exist() {
    let cases = [
        (
            "describe host h11",
            "error: host h11 is not in this rack (HOST_NOT_FOUND)\nhint: did you mean h1? hosts here: h1, h2\n",
        ),
        (
            "get emcs far-away",
            "error: emc far-away is not in this rack (EMC_NOT_FOUND)\nhint: EMCs here: e0, e1\n",
        ),
        (
            "weigh h3 web=2",
            "error: host h3 is not in this rack (HOST_NOT_FOUND)\nhint: did you mean h1? hosts here: h1, h2\n",
        ),
        (
            "get shares far-away",
            "error: host far-away is not in this rack (HOST_NOT_FOUND)\nhint: hosts here: h1, h2\n",
        ),
        (
            "explain shares far-away",
            "error: host far-away is not in this rack (HOST_NOT_FOUND)\nhint: hosts here: h1, h2\n",
        ),
        (
            "describe vm wbe",
            "error: vm wbe has no reservation (VM_NOT_FOUND)\nhint: did you mean web? VMs here: web\n",
        ),
    ];
    for (words, said) in cases {
        let ran = Rack::default().tarn(words).await;
        assert_eq!((ran.stderr.as_str(), ran.code), (said, 3), "tarn {words}");
    }
    let ran = Rack::default().tarn("describe slice 99").await;
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let ran = Rack::default().tarn("get shares h2").await;
    assert!(
        ran.code == 3 && ran.stderr.contains("(SHARES_NOT_REPORTED)\nhint: an agent tells"),
        "{}",
        ran.stderr
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_is_not_there_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nowhere = listener.local_addr().unwrap();
    drop(listener);
    let ran = tarn(&format!("--endpoint http://{nowhere} get rack")).await;
    assert_eq!(ran.code, 6, "{}", ran.stderr);
    assert!(
        ran.stderr.contains(&format!("cannot reach a pool manager at http://{nowhere}: Connection refused"))
    );
    assert!(ran.stderr.contains("hint: is pool-manager running"), "{}", ran.stderr);
    let ran = tarn(&format!("--endpoint http://{nowhere} doctor")).await;
    assert_eq!(ran.code, 1, "the doctor finds that, too: {}", ran.stderr);
    assert!(ran.stdout.contains("cannot reach a pool manager"), "{}", ran.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_goes_away_in_the_middle_is_unavailable() {
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
async fn a_manager_that_does_not_answer_is_given_up() {
    for words in [
        "get rack",
        "commit web",
        "reserve --host h1 --vm v --pool 1GiB --request-id q --wait-ready",
        "watch",
    ] {
        let ran = Rack::new(Mood::Deaf).tarn(&format!("--timeout 100ms {words}")).await;
        assert_eq!(ran.code, 124, "tarn {words}: {}", ran.stderr);
        assert!(ran.stderr.contains("within 100ms"), "{}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_never_ends_is_not_followed_for_ever() {
    for words in ["get slices", "get reservations"] {
        let ran = Rack::new(Mood::Circling).tarn(words).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "tarn {words}: {}", ran.stderr);
        assert!(ran.stderr.contains("does not come to an end"), "tarn {words}: {}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn words_that_make_no_sense_never_reach_the_manager() {
    let wrong = [
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
        "weigh h1 web",
        "weigh h1 web=much",
        "weigh h1 =2",
        "weigh h1 a/b=2",
        "--timeout 0s get rack",
        "--timeout soon get rack",
        "top",
    ];
    for words in wrong {
        let rack = Rack::default();
        let ran = rack.tarn(words).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "tarn {words}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: "), "tarn {words}: {}", ran.stderr);
        assert_eq!(rack.heard(), Vec::<String>::new(), "tarn {words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_reads_its_own_mistakes_as_json() {
    for words in ["release web --force -o json", "get --output=json nothing", "-ojson reserve --pool 1gb"] {
        let ran = tarn(words).await;
        let said: serde_json::Value = serde_json::from_str(&ran.stderr).expect("JSON on stderr");
        assert!(ran.code == 2 && said["exit_code"] == 2 && said["error"].is_string(), "tarn {words}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_makes_no_sense_is_a_usage_error() {
    for words in [
        "--endpoint 127.0.0.1:9750",
        "--endpoint ftp://x",
        "--ca /x --endpoint http://127.0.0.1:1",
        "--endpoint https://h",
    ] {
        let ran = tarn(&format!("{words} get rack")).await;
        assert_eq!(ran.code, 2, "{words}: {}", ran.stderr);
    }
    let ran = tarn("--endpoint https://h --ca /no/such/file get rack").await;
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.starts_with("error: read /no/such/file: No such file or directory"), "{}", ran.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_names_what_was_asked_about_and_the_option() {
    let taken = Mood::Refusing(Code::AlreadyExists, "VM_ALREADY_RESERVED", "vm web has memory");
    let ran = Rack::new(taken).tarn("reserve --host h1 --vm web --pool 1GiB --request-id q1").await;
    let hint = "hint: `tarn describe vm web` shows what it has; `tarn release web` gives it back\n";
    assert!(ran.stderr.ends_with(hint), "{}", ran.stderr);
    let bad =
        Mood::Refusing(Code::InvalidArgument, "BAD_VALUE", "pool_bytes: 1610612736 must be whole slices");
    let ran = Rack::new(bad).tarn("reserve --host h1 --vm web --pool 1536MiB --request-id q1").await;
    assert_eq!(ran.stderr, "error: --pool: 1536MiB must be whole slices (BAD_VALUE)\n");
}

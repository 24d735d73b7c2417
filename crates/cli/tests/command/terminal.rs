//! Test of `tarn top` on a pseudo-terminal.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::OwnedFd,
    process::Stdio,
    time::Duration,
};

use rustix::{
    fs::{Mode, OFlags},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::rack::{Rack, command};

/// Opens a pseudo-terminal with 100 columns and 30 rows. Returns the side of the user and the side
/// of the program.
fn terminal() -> (File, OwnedFd) {
    let user_side = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&user_side).unwrap();
    unlockpt(&user_side).unwrap();
    let path = ptsname(&user_side, Vec::new()).unwrap();
    let program =
        rustix::fs::open(path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    tcsetwinsize(&program, Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (File::from(user_side), program)
}

/// Reads the output of the program until it exits. Sends `key` once the output contains `expected`.
fn read_output(mut user_side: File, expected: &str, key: u8) -> String {
    let (mut output, mut chunk, mut pressed) = (String::new(), [0; 4096], false);
    // Reading fails with EIO after the program has exited.
    while let Ok(n) = user_side.read(&mut chunk) {
        output.push_str(&String::from_utf8_lossy(&chunk[..n]));
        if !pressed && output.contains(expected) {
            user_side.write_all(&[key]).unwrap();
            pressed = true;
        }
    }
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_the_rack_and_restores_the_terminal() {
    let (user_side, program) = terminal();
    let address = Rack::default().listen().await;
    let mut tarn = command(&format!("--endpoint http://{address} top"));
    let stdio = || Stdio::from(program.try_clone().unwrap());
    let mut running = tarn.stdin(stdio()).stdout(stdio()).stderr(stdio()).kill_on_drop(true).spawn().unwrap();
    // Reads end only if no process has the program side open, so this process must close it.
    drop((tarn, program));
    let reading = tokio::task::spawn_blocking(move || read_output(user_side, "quarantined", b'q'));
    let ended = tokio::time::timeout(Duration::from_secs(30), running.wait()).await;
    assert!(ended.expect("tarn top ends on q").unwrap().success());
    let output = reading.await.unwrap();
    let (enter, leave) = ("\u{1b}[?1049h", "\u{1b}[?1049l");
    for part in ["rack u-1  3 of 8 slices free", "30/32", "e1  up enabled  1/4 free"] {
        assert!(output.contains(part), "{part} is missing in {output:?}");
    }
    assert!(output.contains(enter) && output.contains(leave), "{output:?}");
}

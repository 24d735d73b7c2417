//! VMM without a guest, for tests. It reads requests from its standard input, one per line, and
//! prints one line for each reply. It ends when its input is closed.
//!
//! The first argument is the agent's socket. With the further arguments `before UID` or `after
//! UID`, the process becomes another user before or after it connects.
//!
//! Requests:
//! - `attach VM descriptors|paths`: attaches to the memory of a VM
//! - `inspect VM`: inspects the memory of a VM, and opens its slices
//! - `reconnect`: connects to the agent again
//! - `write`: writes a nonzero byte to both ends of every region
//! - `zero`: prints whether every region begins and ends with zero
//! - `end-first-thread`: ends the first thread of the process, while another thread continues

use std::{
    fs::File,
    io::{self, BufRead},
    os::unix::fs::FileExt,
    path::Path,
    sync::mpsc,
    thread,
};

use host_memory::{Client, ClientError, Region, VmMemory};
use proto::v1::MemoryForm;
use rustix::{
    process::{Gid, Uid},
    thread::{set_thread_res_gid, set_thread_res_uid},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let socket = Path::new(arguments.first().ok_or("missing argument: socket")?);
    let change_user = |when: &str| match arguments.get(1) {
        Some(given) if given == when => switch_user(arguments.get(2).ok_or("missing argument: UID")?),
        _ => Ok(()),
    };
    change_user("before")?;
    let client = Client::connect(socket)?;
    change_user("after")?;
    let (end_first_thread, ended) = mpsc::channel();
    let socket = socket.to_owned();
    let server =
        thread::spawn(move || serve(client, &socket, &end_first_thread).map_err(|error| error.to_string()));
    if ended.recv().is_ok() {
        println!("ended");
        // SAFETY: `exit` ends only this thread. No other thread borrows from its stack: `socket` and
        // `end_first_thread` were moved.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    Ok(server.join().map_err(|_| "the thread panicked")??)
}

/// Executes requests until the standard input is closed.
fn serve(
    mut client: Client,
    socket: &Path,
    end_first_thread: &mpsc::Sender<()>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut regions = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["reconnect"] => {
                client = Client::connect(socket)?;
                println!("connected");
            }
            ["end-first-thread"] => end_first_thread.send(())?,
            _ => println!("{}", execute(&client, &mut regions, &words)?),
        }
    }
    Ok(())
}

fn switch_user(uid: &str) -> Result<(), Box<dyn std::error::Error>> {
    let uid = uid.parse()?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_res_gid(gid, gid, gid)?;
    Ok(set_thread_res_uid(uid, uid, uid)?)
}

fn execute(
    client: &Client,
    regions: &mut Vec<(File, u64)>,
    words: &[&str],
) -> Result<String, Box<dyn std::error::Error>> {
    match words {
        ["attach", vm, form] => {
            let form = if *form == "paths" { MemoryForm::Paths } else { MemoryForm::Descriptors };
            reply_text(client.attach(vm, form).map(|memory| open_regions(memory, regions)))
        }
        ["inspect", vm] => reply_text(client.inspect(vm).map(open_slices)),
        ["write"] => {
            regions.iter().try_for_each(|(file, bytes)| {
                file.write_all_at(b"x", 0).and_then(|()| file.write_all_at(b"x", bytes - 1))
            })?;
            Ok("written".to_owned())
        }
        ["zero"] => Ok(are_regions_zero(regions)?.to_string()),
        _ => Err(format!("unknown request {words:?}").into()),
    }
}

fn reply_text(result: Result<io::Result<String>, ClientError>) -> Result<String, Box<dyn std::error::Error>> {
    match result {
        Ok(reply) => Ok(reply?),
        Err(ClientError::Rejected { reason, message }) => Ok(format!("refused {reason} {message}")),
        Err(error) => Err(error.into()),
    }
}

fn open_regions(memory: VmMemory, regions: &mut Vec<(File, u64)>) -> io::Result<String> {
    let names: Vec<String> = memory.regions.iter().map(name).collect();
    *regions = memory.regions.into_iter().map(open).collect::<io::Result<_>>()?;
    Ok(format!("attached {}", names.join(" ")))
}

fn open_slices(memory: VmMemory) -> io::Result<String> {
    let slices: Vec<Region> = memory.regions.into_iter().filter(|region| region.slice.is_some()).collect();
    let names: Vec<String> = slices.iter().map(name).collect();
    slices.into_iter().try_for_each(|region| region.into_file().map(drop))?;
    Ok(format!("inspected {}", names.join(" ")))
}

fn name(region: &Region) -> String {
    let slice = region.slice.map_or("local".to_owned(), |(slice, epoch)| format!("{slice}.{epoch}"));
    format!("{slice}={}", region.bytes)
}

fn open(region: Region) -> io::Result<(File, u64)> {
    let bytes = region.bytes;
    Ok((region.into_file()?, bytes))
}

fn are_regions_zero(regions: &[(File, u64)]) -> io::Result<bool> {
    let mut ends = [[0; 1]; 2];
    for (file, bytes) in regions {
        file.read_exact_at(&mut ends[0], 0)?;
        file.read_exact_at(&mut ends[1], bytes - 1)?;
        if ends != [[0], [0]] {
            return Ok(false);
        }
    }
    Ok(true)
}

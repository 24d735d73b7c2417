//! `tarn backup`: copies the manager's store into a file, whole or not at all.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use proto::v1;
use rustix::fs::{CWD, RenameFlags};
use serde::Serialize;

use crate::{Connection, Failure, Format, args::Backup, print};

#[derive(Serialize)]
struct Done {
    file: String,
    bytes: u64,
}

/// Receives the backup into `FILE.partial`, which gets its name once it is complete and durable.
pub(crate) async fn run(args: &Backup, to: &Connection, format: Format) -> Result<(), Failure> {
    if args.to.exists() {
        return Err(Failure::Value {
            field: "--to",
            value: args.to.display().to_string(),
            rule: "must not exist: choose another name",
        });
    }
    let partial = partial(&args.to);
    let received = receive(&partial, to).await;
    let bytes = match received.and_then(|bytes| publish(&partial, &args.to).map(|()| bytes)) {
        Ok(bytes) => bytes,
        Err(failure) => {
            let _ = fs::remove_file(&partial); // the first failure is the one to report
            return Err(failure);
        }
    };
    let done = Done { file: args.to.display().to_string(), bytes };
    print::say(format, &done, |_| format!("{}: {} bytes\n", done.file, done.bytes))
}

async fn receive(partial: &Path, to: &Connection) -> Result<u64, Failure> {
    let mut file = OpenOptions::new();
    let file = file.write(true).create(true).truncate(true).mode(0o600).open(partial);
    let mut file = file.map_err(failed("make", partial))?;
    let mut chunks = to.ask(to.admin().backup(v1::BackupRequest {})).await?;
    let mut bytes = 0;
    while let Some(chunk) = to.within_time(chunks.message()).await? {
        file.write_all(&chunk.data).map_err(failed("write", partial))?;
        bytes += chunk.data.len() as u64;
    }
    file.sync_all().map_err(failed("sync", partial))?;
    Ok(bytes)
}

fn publish(partial: &Path, path: &Path) -> Result<(), Failure> {
    let named = rustix::fs::renameat_with(CWD, partial, CWD, path, RenameFlags::NOREPLACE);
    named.map_err(|errno| failed("name", path)(errno.into()))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed("sync the folder of", path))
}

fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

fn failed(tried: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |errno| Failure::File { tried, path, errno }
}

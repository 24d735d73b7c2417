//! `tarn backup`: copies the manager's store into a file, whole or not at all.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use proto::v1;
use rustix::{
    fs::{CWD, RenameFlags},
    io::Errno,
};
use serde::Serialize;

use crate::{Connection, Failure, Format, args::Backup, print};

#[derive(Serialize)]
struct Done {
    file: String,
    bytes: u64,
}

/// Receives the backup into `FILE.PID.partial`, which gets its name once it is complete and durable.
pub(crate) async fn run(args: &Backup, to: &Connection, format: Format) -> Result<(), Failure> {
    if args.to.exists() {
        return Err(Failure::Value {
            field: "--to",
            value: args.to.display().to_string(),
            rule: "must not exist: choose another name",
        });
    }
    let partial = partial(&args.to);
    let mut file = OpenOptions::new();
    let file =
        file.write(true).create_new(true).mode(0o600).open(&partial).map_err(failed("make", &partial))?;
    let received = receive(file, &partial, to).await;
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

async fn receive(mut file: File, partial: &Path, to: &Connection) -> Result<u64, Failure> {
    let mut chunks = to.ask(to.admin().backup(v1::BackupRequest {})).await?;
    let (mut bytes, mut total_bytes) = (0, None);
    // The first message comes when the manager has copied its store.
    while let Some(chunk) = to.within(to.patience(), chunks.message()).await? {
        file.write_all(&chunk.data).map_err(failed("write", partial))?;
        bytes += chunk.data.len() as u64;
        total_bytes = chunk.total_bytes.or(total_bytes);
    }
    if total_bytes != Some(bytes) {
        return Err(Failure::Protocol(format!("the backup ends after {bytes} bytes, without its last part")));
    }
    file.sync_all().map_err(failed("sync", partial))?;
    Ok(bytes)
}

fn publish(partial: &Path, path: &Path) -> Result<(), Failure> {
    match rustix::fs::renameat_with(CWD, partial, CWD, path, RenameFlags::NOREPLACE) {
        // NFS cannot rename without replacing.
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(partial, path).and_then(|()| fs::remove_file(partial))
        }
        named => named.map_err(Into::into),
    }
    .map_err(failed("name", path))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed("sync the folder of", path))
}

fn partial(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    name.into()
}

fn failed(tried: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |errno| Failure::File { tried, path, errno }
}

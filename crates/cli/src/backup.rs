//! `tarn backup`: saves a copy of the manager's store as a file. A failed backup leaves no file.

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
struct BackupSummary {
    file: String,
    bytes: u64,
}

/// Receives the backup into `FILE.PID.partial`, and renames this file once it is complete and
/// durable.
pub(crate) async fn run(args: &Backup, manager: &Connection, format: Format) -> Result<(), Failure> {
    if args.to.exists() {
        return Err(Failure::InvalidValue {
            field: "--to",
            value: args.to.display().to_string(),
            rule: "must not exist".into(),
        });
    }
    let partial = partial_path(&args.to);
    let mut file = OpenOptions::new();
    let file = file
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&partial)
        .map_err(file_error("create", &partial))?;
    let received = receive_backup(file, &partial, manager).await;
    let bytes = match received.and_then(|bytes| publish_backup(&partial, &args.to).map(|()| bytes)) {
        Ok(bytes) => bytes,
        Err(failure) => {
            let _ = fs::remove_file(&partial); // the error of the backup is more important
            return Err(failure);
        }
    };
    let summary = BackupSummary { file: args.to.display().to_string(), bytes };
    print::value(format, &summary, |_| format!("{}: {} bytes\n", summary.file, summary.bytes))
}

async fn receive_backup(mut file: File, partial: &Path, manager: &Connection) -> Result<u64, Failure> {
    let mut chunks = manager.call(manager.admin().backup(v1::BackupRequest {})).await?;
    let (mut bytes, mut total_bytes) = (0, None);
    // Before the first message, the manager copies its store, which needs a longer timeout.
    while let Some(chunk) = manager.await_with_timeout(manager.wait_timeout(), chunks.message()).await? {
        file.write_all(&chunk.data).map_err(file_error("write", partial))?;
        bytes += chunk.data.len() as u64;
        total_bytes = chunk.total_bytes.or(total_bytes);
    }
    if total_bytes != Some(bytes) {
        return Err(Failure::Protocol(format!(
            "the backup is incomplete: the stream ended after {bytes} bytes, before its final chunk"
        )));
    }
    file.sync_all().map_err(file_error("sync", partial))?;
    Ok(bytes)
}

fn publish_backup(partial: &Path, path: &Path) -> Result<(), Failure> {
    match rustix::fs::renameat_with(CWD, partial, CWD, path, RenameFlags::NOREPLACE) {
        // Fallback for file systems without RENAME_NOREPLACE, such as NFS. A hard link does not
        // replace an existing file either.
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(partial, path).and_then(|()| fs::remove_file(partial))
        }
        renamed => renamed.map_err(Into::into),
    }
    .map_err(file_error("create", path))?;
    let directory =
        path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(file_error("sync the directory of", path))
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    name.into()
}

fn file_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let path = path.to_owned();
    move |errno| Failure::File { operation, path, errno }
}

//! Checks whether the manager can use the folders of `rack.toml`. They change nothing.

use std::path::Path;

use config_file::{ConfigError, Violation, reject_violations};
use service_files::folders::{check_socket_folder, check_usable};

use super::{Config, Listen};

/// Field of the path of the socket.
const SOCKET_FIELD: &str = "manager.listen";
/// Folder in which systemd creates the folder of the socket before it starts the manager.
const RUNTIME_FOLDERS: &str = "/run";

impl Config {
    /// Checks that the store, the EMCs and the socket have folders on file systems that can store
    /// files. If the manager's user, which has the ID `manager_uid`, is the user of this process,
    /// also checks that this user can create the folders and files in them. `path` is the path of
    /// the configuration file, for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn check_usable(&self, path: &Path, manager_uid: u32) -> Result<(), ConfigError> {
        let is_own = manager_uid == rustix::process::geteuid().as_raw();
        let emcs = self.emcs.iter().enumerate().map(|(i, emc)| (format!("emc[{i}].path"), &emc.path));
        let folders =
            [(self.manager.folder_field().to_owned(), &self.manager.folder)].into_iter().chain(emcs);
        let folders = folders.filter_map(|(field, folder)| {
            Some(Violation::of_path(field, folder, check_usable(folder, is_own).err()?))
        });
        let socket = self.socket_and_folder().and_then(|(socket, folder)| {
            let is_created_by_systemd = folder.starts_with(RUNTIME_FOLDERS) && !folder.exists();
            let rule = check_usable(folder, is_own && !is_created_by_systemd).err()?;
            Some(Violation::of_path(SOCKET_FIELD, socket, rule))
        });
        reject_violations(path, folders.chain(socket).collect())
    }

    /// Returns the violation if another unprivileged user owns the folder of the socket.
    pub(super) fn find_socket_violation(&self, manager_uid: u32) -> Option<Violation> {
        let (socket, folder) = self.socket_and_folder()?;
        let rule = check_socket_folder(folder, manager_uid).err()?;
        Some(Violation::of_path(SOCKET_FIELD, socket, rule))
    }

    /// Returns the paths of the unix socket and of its folder.
    fn socket_and_folder(&self) -> Option<(&Path, &Path)> {
        match &self.manager.listen {
            Listen::Unix(path) => Some((path, path.parent()?)),
            Listen::Tcp(_) => None,
        }
    }
}

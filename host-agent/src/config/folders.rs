//! Checks of the folders that host.toml names. They change nothing.

use std::path::{Path, PathBuf};

use config_file::{ConfigError, Violation, reject_violations};
use service_files::folders::{check_socket_folder, check_usable};

use super::Config;
use crate::{protected_dir::LOCAL_DIR_FIELD, runtime_dir::RUNTIME_DIR_FIELD, user::current_user};

/// Name of the configuration key for the socket at which VMMs attach to memory.
const SOCKET_FIELD: &str = "agent.socket";
/// Name of the configuration key for the socket of soft memory.
const SOFT_MEMORY_SOCKET_FIELD: &str = "soft_memory.socket";

impl Config {
    /// Checks that this process can create and use the folders of the agent and of its sockets.
    /// `path` is the path of host.toml, for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn check_folders(&self, path: &Path) -> Result<(), ConfigError> {
        let local_dir = self.backend.local_dir().map(|dir| (LOCAL_DIR_FIELD, dir));
        let folders = [(RUNTIME_DIR_FIELD, self.runtime_dir.as_path())].into_iter().chain(local_dir);
        let rules = folders.map(|(field, folder)| (field, folder, check_usable(folder, true)));
        let sockets = self.sockets();
        let sockets =
            sockets.iter().map(|(field, socket)| (*field, socket.as_path(), self.check_new_socket(socket)));
        let violations = rules
            .chain(sockets)
            .filter_map(|(field, value, rule)| Some(Violation::of_path(field, value, rule.err()?)));
        reject_violations(path, violations.collect())
    }

    /// Checks that no other unprivileged user can replace a socket in its folder. `path` is the path of
    /// host.toml, for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn check_socket_folders(&self, path: &Path) -> Result<(), ConfigError> {
        let sockets = self.sockets();
        let violations = sockets.iter().filter_map(|(field, socket)| {
            let rule = check_socket_folder(folder_of(socket), current_user().get()).err()?;
            Some(Violation::of_path(*field, socket, rule))
        });
        reject_violations(path, violations.collect())
    }

    /// Returns the sockets on which the agent listens, with their configuration keys.
    fn sockets(&self) -> Vec<(&'static str, PathBuf)> {
        let soft_memory = self.soft_memory.is_some();
        let soft_memory = soft_memory.then(|| (SOFT_MEMORY_SOCKET_FIELD, self.soft_memory_socket()));
        [(SOCKET_FIELD, self.socket.clone())].into_iter().chain(soft_memory).collect()
    }

    /// Checks that a socket can be created: in an existing folder, or in one that the agent
    /// creates.
    fn check_new_socket(&self, socket: &Path) -> Result<(), String> {
        let folder = folder_of(socket);
        let mut created = [Some(self.runtime_dir.as_path()), self.backend.local_dir()].into_iter().flatten();
        if !created.any(|created| created.starts_with(folder)) && !folder.exists() {
            return Err(format!(
                "the folder {} does not exist: create it, or use runtime_dir",
                folder.display()
            ));
        }
        check_usable(folder, true)?;
        check_socket_folder(folder, current_user().get())
    }
}

fn folder_of(socket: &Path) -> &Path {
    socket.parent().unwrap_or(socket)
}

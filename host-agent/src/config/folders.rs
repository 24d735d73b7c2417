//! Checks of the folders that host.toml names. They change nothing.

use std::path::Path;

use config_file::{ConfigError, Violation, reject_violations};
use service_files::folders::{check_socket_folder_owner, check_usable};

use super::Config;
use crate::{protected_dir::LOCAL_DIR_FIELD, runtime_dir::RUNTIME_DIR_FIELD, user::current_user};

/// Name of the configuration key for the socket at which VMMs attach to memory.
const SOCKET_FIELD: &str = "agent.socket";

impl Config {
    /// Checks that this process can create and use the folders of the agent and of its socket.
    /// `path` is the path of host.toml, for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all violations.
    pub fn check_folders(&self, path: &Path) -> Result<(), ConfigError> {
        let local_dir = self.backend.local_dir().map(|dir| (LOCAL_DIR_FIELD, dir));
        let folders = [(RUNTIME_DIR_FIELD, self.runtime_dir.as_path())].into_iter().chain(local_dir);
        let rules = folders.map(|(field, folder)| (field, folder, check_usable(folder, true)));
        let socket = (SOCKET_FIELD, self.socket.as_path(), self.check_new_socket());
        let violations = rules
            .chain([socket])
            .filter_map(|(field, value, rule)| Some(Violation::of_path(field, value, rule.err()?)));
        reject_violations(path, violations.collect())
    }

    /// Checks that no other unprivileged user owns the folder of the socket. `path` is the path of
    /// host.toml, for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn check_socket_owner(&self, path: &Path) -> Result<(), ConfigError> {
        let violation = check_socket_folder_owner(self.socket_folder(), current_user().get()).err();
        let violation = violation.map(|rule| Violation::of_path(SOCKET_FIELD, &self.socket, rule));
        reject_violations(path, violation.into_iter().collect())
    }

    fn socket_folder(&self) -> &Path {
        self.socket.parent().unwrap_or(&self.socket)
    }

    /// Checks that the socket can be created: in an existing folder, or in one that the agent
    /// creates.
    fn check_new_socket(&self) -> Result<(), String> {
        let folder = self.socket_folder();
        let mut created = [Some(self.runtime_dir.as_path()), self.backend.local_dir()].into_iter().flatten();
        if !created.any(|created| created.starts_with(folder)) && !folder.exists() {
            return Err(format!(
                "the folder {} does not exist: create it, or use runtime_dir",
                folder.display()
            ));
        }
        check_usable(folder, true)?;
        check_socket_folder_owner(folder, current_user().get())
    }
}

//! The programs that make hosts.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::error::HostsError;

/// Where administrators' programs are; not on everybody's `PATH`.
const BESIDE: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/local/sbin"];

/// Where they were found.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) ip: PathBuf,
    pub(super) tc: PathBuf,
    pub(super) nsenter: PathBuf,
    pub(super) unshare: PathBuf,
    pub(super) sh: PathBuf,
}

impl Programs {
    /// Looks for all of them in the folders of `path` and where administrators'
    /// programs are.
    pub(super) fn find(path: Option<&OsStr>) -> Result<Self, HostsError> {
        let path = path.unwrap_or_default();
        let mut folders: Vec<PathBuf> = env::split_paths(path).collect();
        folders.extend(BESIDE.map(PathBuf::from));
        Self::among(&folders)
    }

    fn among(folders: &[PathBuf]) -> Result<Self, HostsError> {
        let find = |program: &'static str, package: &'static str| {
            folders
                .iter()
                .map(|folder| folder.join(program))
                .find(|path| is_program(path))
                .ok_or(HostsError::Missing { program, package })
        };
        Ok(Self {
            ip: find("ip", "iproute2")?,
            tc: find("tc", "iproute2")?,
            nsenter: find("nsenter", "util-linux")?,
            unshare: find("unshare", "util-linux")?,
            sh: find("sh", "dash")?,
        })
    }
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;

    path.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_missing_program_is_named_with_what_to_install() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = [folder.path().to_path_buf()];
        for (program, package) in [
            ("ip", "iproute2"),
            ("tc", "iproute2"),
            ("nsenter", "util-linux"),
            ("unshare", "util-linux"),
            ("sh", "dash"),
        ] {
            let text = Programs::among(&folders)
                .expect_err("one is missing")
                .to_string();
            assert!(text.contains(&format!("`{program}`")), "{text}");
            assert!(text.contains(package), "{text}");
            // Not to be run: not a program yet.
            let path = folder.path().join(program);
            fs::write(&path, "").expect("a file");
            Programs::among(&folders).expect_err("a file that may not be run");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        }
        let found = Programs::among(&folders).expect("all are there");
        assert_eq!(found.tc, folder.path().join("tc"));
    }
}

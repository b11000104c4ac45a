//! Web servers from Debian's packages: nginx with its two forms of an index, Apache with pages and with WebDAV. Files are put into
//! their directory, as whoever keeps such a server does.

use crate::common::BUCKET;
use crate::servers::{Below, Kept, Real, program};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const USER: &str = "reader";
const PASSWORD: &str = "password";
/// Of that password, as `htpasswd -s` writes it; both servers read it.
const USERS: &str = "reader:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=\n";

pub(crate) async fn nginx() -> Real {
    nginx_with("nginx", "html")
}

pub(crate) async fn nginx_json() -> Real {
    nginx_with("nginx-json", "json")
}

pub(crate) async fn apache() -> Real {
    apache_with("apache", "")
}

pub(crate) async fn apache_dav() -> Real {
    apache_with("apache-dav", "Dav On")
}

fn nginx_with(name: &'static str, format: &str) -> Real {
    let mut real = serve(name, |port, dir| {
        let at = dir.display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|of| format!("  {of}_temp_path {at}/temporary;\n"))
            .collect();
        let settings = format!(
            "daemon off;\nuser root;\npid {at}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\n{temporary}  access_log off;\n  \
             server {{\n    listen 127.0.0.1:{port};\n    root {at}/root;\n    auth_basic millpond;\n    \
             auth_basic_user_file {at}/users;\n    autoindex on;\n    autoindex_format {format};\n  }}\n}}\n"
        );
        let file = dir.join("settings");
        std::fs::write(&file, settings).unwrap();
        let mut command = Command::new(program("web/usr/sbin/nginx"));
        command.arg("-p").arg(dir).arg("-e").arg("stderr").arg("-c").arg(file);
        command
    });
    // Its index has no name that begins with a dot.
    real.breaks_at = &["...", "..a", ".hidden"];
    real
}

fn apache_with(name: &'static str, dav: &str) -> Real {
    serve(name, |port, dir| {
        let (at, root) = (dir.display(), program("web"));
        let modules: String = [
            "mpm_event",
            "authn_core",
            "authn_file",
            "authz_core",
            "authz_user",
            "auth_basic",
            "dir",
            "autoindex",
            "dav",
            "dav_fs",
        ]
        .iter()
        .map(|module| {
            format!("LoadModule {module}_module {}/usr/lib/apache2/modules/mod_{module}.so\n", root.display())
        })
        .collect();
        let settings = format!(
            "ServerRoot {at}\nServerName 127.0.0.1\nListen 127.0.0.1:{port}\nPidFile {at}/pid\nErrorLog /dev/stderr\nUser nobody\n\
             Group nogroup\nMutex file:{at}\nDocumentRoot {at}/root\n{modules}DavLockDB {at}/temporary/locks\n<Directory {at}/root>\n\
             Options +Indexes\n{dav}\nAuthType Basic\nAuthName millpond\nAuthUserFile {at}/users\nRequire valid-user\n</Directory>\n"
        );
        let file = dir.join("settings");
        std::fs::write(&file, settings).unwrap();
        let mut command = Command::new(root.join("usr/sbin/apache2"));
        // Its libraries come along.
        let libraries = std::fs::read_dir(root.join("usr/lib")).unwrap().map(|entry| entry.unwrap().path());
        let libraries = libraries.filter(|path| path.to_string_lossy().ends_with("-linux-gnu"));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
        command.args(["-D", "FOREGROUND", "-f"]).arg(file);
        command
    })
}

fn serve(name: &'static str, command: impl FnOnce(u16, &Path) -> Command) -> Real {
    let mut real = Real::start(name, "http", |port, dir| {
        // Apache's own user reads there.
        std::fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir_all(dir.join("root").join(BUCKET)).unwrap();
        std::fs::create_dir(dir.join("temporary")).unwrap();
        std::fs::set_permissions(dir.join("temporary"), Permissions::from_mode(0o777)).unwrap();
        std::fs::write(dir.join("users"), USERS).unwrap();
        command(port, dir)
    });
    let login = |password: &str| vec![("username", USER.to_owned()), ("password", password.to_owned())];
    real.secrets = login(PASSWORD);
    real.wrong = Some((login("hunter2"), "check those that are there"));
    real.below_a_file = Below::Refused;
    real
}

/// By renaming, so that nobody reads a half of it. `key` ends in a slash: a directory.
pub(crate) fn put(dir: &Path, key: &str, body: &[u8]) -> Kept {
    let path = dir.join("root").join(BUCKET).join(key);
    let written = || {
        if key.ends_with('/') {
            return std::fs::create_dir_all(&path);
        }
        std::fs::create_dir_all(path.parent().unwrap_or(dir))?;
        let new = dir.join("temporary/new");
        std::fs::write(&new, body)?;
        std::fs::rename(new, &path)
    };
    // A web server's status for what cannot be put.
    if written().is_ok() { Kept::Yes } else { Kept::No(409) }
}

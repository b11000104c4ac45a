//! What of a user's `krb5.conf` a helper can be given.
//!
//! Kerberos' library does more with this file than to find its servers: it reads other files that it names (`include`,
//! `includedir`), loads code (`module`, `[plugins]`) and takes keytabs, ticket caches and certificates from paths in it.
//! None of that is the user's to say on a node that is not theirs. So only what is known is let through, written so
//! that there is one way to read it: the library's own parser (`prof_parse.c`) forgives much.

use std::fmt;

/// Longer than any that a site hands out.
const BYTES_MAX: usize = 64 << 10;
const DEPTH_MAX: usize = 8;

/// Which line is refused, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadKrb5Conf {
    /// From 1; 0: the whole.
    pub line: usize,
    pub why: &'static str,
}

impl fmt::Display for BadKrb5Conf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "krb5.conf {}", self.why),
            line => write!(f, "line {line} of krb5.conf {}", self.why),
        }
    }
}

impl std::error::Error for BadKrb5Conf {}

/// Sections that concern a client.
const SECTIONS: &[&str] = &["libdefaults", "realms", "domain_realm", "capaths", "appdefaults"];
/// Sections that say what other programs do: they are in files that sites hand out, and the library looks at none of
/// them.
const IGNORED_SECTIONS: &[&str] = &["logging", "kdc", "kdcdefaults", "login", "dbdefaults", "dbmodules"];

/// What `[libdefaults]` may set. What names a file, a helper program or a plug-in is not here.
const LIBDEFAULTS: &[&str] = &[
    "allow_des3",
    "allow_rc4",
    "allow_weak_crypto",
    "canonicalize",
    "clockskew",
    "default_realm",
    "default_tgs_enctypes",
    "default_tkt_enctypes",
    "dns_canonicalize_hostname",
    "dns_lookup_kdc",
    "dns_lookup_realm",
    "dns_uri_lookup",
    "enforce_ok_as_delegate",
    "forwardable",
    "ignore_acceptor_hostname",
    "kdc_default_options",
    "kdc_timesync",
    "max_retries",
    "noaddresses",
    "permitted_enctypes",
    "preferred_preauth_types",
    "proxiable",
    "qualify_shortname",
    "rdns",
    "realm_try_domains",
    "renew_lifetime",
    "request_timeout",
    "safe_checksum_type",
    "ticket_lifetime",
    "udp_preference_limit",
    "verify_ap_req_nofail",
];
/// What every site's file has although it names files or programs: where caches are is ours to say, so it is left out.
const LEFT_OUT: &[&str] = &[
    "ccache_type",
    "default_ccache_name",
    "fcc-mit-ticketflags",
    "pkinit_anchors",
    "pkinit_pool",
    "plugin_base_dir",
    "spake_preauth_groups",
];

/// What one of `[realms]` may set.
const REALM: &[&str] = &[
    "admin_server",
    "auth_to_local",
    "auth_to_local_names",
    "default_domain",
    "disable_encrypted_timestamp",
    "kdc",
    "kpasswd_server",
    "master_kdc",
    "primary_kdc",
    "v4_instance_convert",
    "v4_realm",
];

/// What concerns a client, line by line; what other programs are told is left out.
///
/// # Errors
/// The first line that cannot be given to a helper.
pub fn cleaned(text: &str) -> Result<String, BadKrb5Conf> {
    let whole = |why| Err(BadKrb5Conf { line: 0, why });
    if text.len() > BYTES_MAX {
        return whole("is longer than 64 KiB");
    }
    if text.contains('\0') {
        return whole("has a byte 0 in it");
    }
    // What the library takes for the end of a line it must be here, too.
    if text.replace("\r\n", "\n").contains(['\r', '\u{b}', '\u{c}']) {
        return whole("has a control character in it: write each setting on a line of its own");
    }
    let (mut reader, mut kept) = (Reader::default(), String::new());
    for (number, line) in text.lines().enumerate() {
        if reader.line(line).map_err(|why| BadKrb5Conf { line: number + 1, why })? {
            kept.push_str(line.trim_end_matches('\r'));
            kept.push('\n');
        }
    }
    match reader.open.is_empty() {
        true => Ok(kept),
        false => whole("ends within braces"),
    }
}

#[derive(Default)]
struct Reader<'t> {
    section: Option<&'t str>,
    /// Names before the braces that are open.
    open: Vec<&'t str>,
}

impl<'t> Reader<'t> {
    /// Is it kept?
    fn line(&mut self, line: &'t str) -> Result<bool, &'static str> {
        let line = line.trim_matches([' ', '\t', '\r']);
        if line.is_empty() || line.starts_with(['#', ';']) {
            return Ok(false);
        }
        let lower = line.to_ascii_lowercase();
        if lower.starts_with("include") {
            return Err("includes another file: copy its settings to here");
        }
        if lower.starts_with("module") {
            return Err("loads a module, which no volume may");
        }
        if line.starts_with('[') {
            self.begin(line)?;
            return Ok(!self.is_ignored());
        }
        // Nothing of it is passed on, so nothing in it has to be understood.
        if self.is_ignored() {
            return Ok(false);
        }
        let Some(section) = self.section else { return Err("stands before the first section") };
        if line == "}" {
            return self.open.pop().map(|_| true).ok_or("closes a brace that is not open");
        }
        if line.starts_with('}') {
            return Err("has something behind a brace: write it on a line of its own");
        }
        let Some((name, value)) = line.split_once('=') else {
            return Err("is neither a section nor a setting (name = value)");
        };
        let name = name.trim_matches([' ', '\t']);
        let name = name.strip_suffix('*').unwrap_or(name).trim_end_matches([' ', '\t']);
        let value = value.trim_matches([' ', '\t']);
        if name.is_empty() || !name.chars().all(is_of_name) {
            return Err("has a name that no setting has");
        }
        if section == "libdefaults" && self.open.is_empty() && LEFT_OUT.contains(&name) && value != "{" {
            return Ok(false);
        }
        if value == "{" {
            if self.open.len() == DEPTH_MAX {
                return Err("nests braces too deeply");
            }
            self.open.push(name);
            return Ok(true);
        }
        if value.contains(['{', '}']) && section != "realms" {
            return Err("has a brace in a value: write it on a line of its own");
        }
        self.setting(section, name, value).map(|()| true)
    }

    fn is_ignored(&self) -> bool {
        self.section.is_some_and(|section| IGNORED_SECTIONS.contains(&section))
    }

    fn begin(&mut self, line: &'t str) -> Result<(), &'static str> {
        if !self.open.is_empty() {
            return Err("begins a section within braces");
        }
        let name = line.strip_prefix('[').and_then(|rest| {
            let (name, rest) = rest.split_once(']')?;
            matches!(rest.trim(), "" | "*").then_some(name)
        });
        let Some(name) = name else { return Err("is no section: write [name]") };
        if name == "plugins" {
            return Err("is the section of plug-ins, which no volume may load");
        }
        if !SECTIONS.contains(&name) && !IGNORED_SECTIONS.contains(&name) {
            return Err(
                "is a section that a volume may not have: libdefaults, realms, domain_realm, capaths, appdefaults are known",
            );
        }
        self.section = Some(name);
        Ok(())
    }

    fn setting(&self, section: &str, name: &str, value: &str) -> Result<(), &'static str> {
        let known = match (section, self.open.len()) {
            ("libdefaults", 0) => LIBDEFAULTS.contains(&name),
            // A realm's own defaults: the library looks there, too.
            ("libdefaults", 1) => LIBDEFAULTS.contains(&name),
            ("realms", 1) => REALM.contains(&name),
            // auth_to_local_names.
            ("realms", 2) => self.open[1] == "auth_to_local_names",
            ("domain_realm", 0) => true,
            ("capaths", 1) => true,
            // Of programs; the library reads what its own tools are told.
            ("appdefaults", _) => false,
            _ => false,
        };
        if section == "appdefaults" {
            return Err("is for a program that a helper is not: leave the section appdefaults empty");
        }
        if !known {
            return Err(
                "sets something that a volume may not set: it names files or programs, or is not known here",
            );
        }
        match name {
            // A proxy of KDCs is a URL, and its certificate a file of the node's.
            "kdc" | "admin_server" | "kpasswd_server" | "master_kdc" | "primary_kdc"
                if value.contains('/') =>
            {
                Err("names no host: KDC proxies (https://…) and sockets are not supported")
            }
            _ if section != "realms"
                && value.contains('/')
                && !matches!(section, "capaths" | "domain_realm") =>
            {
                Err("has a path in it, which no volume may name")
            }
            _ => Ok(()),
        }
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '@' | '/' | ':')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const USUAL: &str = "\
# What a site hands out.
[libdefaults]
    default_realm = EXAMPLE.COM
    dns_lookup_kdc = false
    rdns = false
    ticket_lifetime = 24h
    renew_lifetime = 7d
    forwardable = true
    udp_preference_limit = 1
    default_tkt_enctypes = aes256-cts-hmac-sha1-96 aes128-cts
    kdc_timesync = 1

[realms]
    EXAMPLE.COM = {
        kdc = kdc1.example.com:88
        kdc = tcp:kdc2.example.com
        kdc = [2001:db8::1]:88
        admin_server = kdc1.example.com
        auth_to_local = RULE:[1:$1@$0](.*@OTHER)s/@.*//
        auth_to_local_names = {
            hdfs = alice
        }
    }

[domain_realm]
    .example.com = EXAMPLE.COM
    example.com = EXAMPLE.COM
[capaths]
    A.COM = {
        B.COM = .
    }
";

    #[test]
    fn what_sites_hand_out_is_taken_and_what_is_not_a_clients_is_left_out() {
        let kept = cleaned(USUAL).unwrap();
        assert_eq!(cleaned(&kept).as_ref(), Ok(&kept));
        assert!(!kept.contains('#') && kept.contains("hdfs = alice"));
        assert_eq!(cleaned(&USUAL.replace('\n', "\r\n")).as_ref(), Ok(&kept));
        assert_eq!(cleaned("").as_deref(), Ok(""));
        let more = "[logging]\n default = FILE:/var/log/krb5libs.log\n[kdc]\n profile = {\n x = [y\n\n";
        let whole = USUAL.replace("[libdefaults]\n", "[libdefaults]\n default_ccache_name = KEYRING:persistent:%{uid}\n pkinit_anchors = FILE:/etc/pki/x\n");
        assert_eq!(cleaned(&format!("{more}{whole}")), Ok(kept));
    }

    #[test]
    fn what_reads_files_or_loads_code_is_refused_however_it_is_written() {
        let in_defaults = |line: &str| format!("[libdefaults]\n{line}\n");
        for bad in [
            "include /etc/shadow".to_owned(),
            "  include /etc/krb5.conf.d/x".to_owned(),
            "\tincludedir /etc".to_owned(),
            "INCLUDE /etc/x".to_owned(),
            "include\t/etc/x".to_owned(),
            format!("{USUAL}includedir /etc/krb5.conf.d/\n"),
            "module /tmp/evil.so:evil".to_owned(),
            "[plugins]\nccselect = {\n module = x:/tmp/evil.so\n}\n".to_owned(),
            "[plugins]*\n".to_owned(),
            "[realms]\nA = {\nmodule = x\n}\n".to_owned(),
            in_defaults("default_keytab_name = FILE:/etc/krb5.keytab"),
            in_defaults("default_client_keytab_name = /var/x"),
            in_defaults("k5login_directory = /tmp"),
            in_defaults("default_realm = /etc/passwd"),
            in_defaults("A.COM = {\ndefault_keytab_name = x\n}"),
            in_defaults("default_realm = A\rinclude /etc/shadow"),
            in_defaults("default_realm = A\u{b}include /etc/shadow"),
            "[libdefaults]\ndefault_realm = A\0\ninclude /etc/shadow".to_owned(),
            "[realms]\nA = {\nkdc = https://169.254.169.254/\n}\n".to_owned(),
            "[realms]\nA = {\nkdc = /run/secrets/socket\n}\n".to_owned(),
            "[realms]\nA = {\nhttp_anchors = FILE:/etc/shadow\n}\n".to_owned(),
            "[realms]\nA = {\ndatabase_module = x\n}\n".to_owned(),
            "[realms]\nA = {\npkinit_identities = FILE:/x\n}\n".to_owned(),
            "[appdefaults]\npam = {\nkeytab = /etc/krb5.keytab\n}\n".to_owned(),
            "[libdefaults\ndefault_realm = A\n".to_owned(),
            "[libdefaults] [plugins]\n".to_owned(),
            "[logging]\ndefault = FILE:/x\ninclude /etc/shadow\n".to_owned(),
            "[libdefaults]\nA = {\n[kdc]\n}\n".to_owned(),
            "default_realm = A\n".to_owned(),
            "[realms]\nA = {\n".to_owned(),
            "[realms]\n}\n".to_owned(),
            "[realms]\nA = {\n} [plugins]\n".to_owned(),
            "[realms]\nA = {\n[plugins]\n}\n".to_owned(),
            in_defaults("default realm"),
            in_defaults("de fault = A"),
            "x".repeat(BYTES_MAX + 1),
            format!("[capaths]\n{}", "A = {\n".repeat(DEPTH_MAX + 1)),
        ] {
            let why = cleaned(&bad).expect_err(&bad).to_string();
            assert!(why.contains("krb5.conf"), "{why}");
        }
    }

    #[test]
    fn the_message_names_the_line() {
        let bad = cleaned("[libdefaults]\ndefault_realm = A\ninclude /x\n").unwrap_err();
        assert_eq!(bad.to_string(), "line 3 of krb5.conf includes another file: copy its settings to here");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,200}") {
            let _ = cleaned(&text);
        }

        #[test]
        fn wherever_a_line_that_includes_is_put_it_is_found(at in 0..40_usize, indent in "[ \t]{0,3}") {
            let mut lines: Vec<&str> = USUAL.lines().collect();
            let line = format!("{indent}include /etc/shadow");
            lines.insert(at.min(lines.len()), &line);
            prop_assert!(cleaned(&lines.join("\n")).is_err());
        }
    }
}

//! What the environment of a process says about credentials. Nothing here calls a service.

use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use cleat_backend::CredentialFile;
use cleat_backend::uri::{invalid, shown};
use cleat_core::error::{Error, ErrorKind, Result};

use super::super::bucket::{Endpoint, is_label};
use super::super::keys::{Keys, MAX_BYTES};
use super::super::origin::Origin;

/// Returns the value of a variable of the environment, if it is set.
pub(super) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns what a source has; the second argument is the region of the volume. An error is a source that is set up in
/// a wrong way.
type Source = fn(Variables<'_>, &str) -> Result<Answer>;

/// All sources of Amazon's keys, in their order.
pub(super) const ALL: [Source; 5] = [environment, web_identity, shared_file, container, instance];

/// The host of the service for the credentials of a container on ECS, and the one on EKS.
const CONTAINER_HOSTS: [&str; 3] = ["169.254.170.2", "169.254.170.23", "[fd00:ec2::23]"];

/// What a source has.
#[derive(Debug)]
pub(super) enum Answer {
    Keys(Keys, Origin),
    Service(Service),
    /// It is not set up, for this reason.
    Nothing(String),
}

/// A service that gives temporary keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Service {
    /// STS, which exchanges a token for the keys of a role.
    WebIdentity { token_file: PathBuf, role: String, session: String, endpoint: String },
    /// The service for the credentials of a container, by the end of its address.
    Task { path: String },
    /// The same by its address, with a token.
    Container { url: String, token_file: PathBuf },
    /// The metadata service of an instance.
    Instance { endpoint: String },
}

impl Service {
    pub(super) fn origin(&self) -> Origin {
        match self {
            Self::WebIdentity { .. } => Origin::WebIdentity,
            Self::Task { .. } | Self::Container { .. } => Origin::Container,
            Self::Instance { .. } => Origin::Instance,
        }
    }

    /// Returns the file with its token.
    pub(super) fn token_file(&self) -> Option<CredentialFile> {
        match self {
            Self::WebIdentity { token_file, .. } => {
                Some(named(token_file.clone(), "token", "AWS_WEB_IDENTITY_TOKEN_FILE"))
            }
            Self::Container { token_file, .. } => {
                let option = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
                Some(named(token_file.clone(), "token", option))
            }
            Self::Task { .. } | Self::Instance { .. } => None,
        }
    }

    /// Returns its address, for messages.
    pub(super) fn address(&self) -> &str {
        match self {
            Self::WebIdentity { endpoint, .. } | Self::Instance { endpoint } => endpoint,
            Self::Container { url, .. } => url,
            Self::Task { .. } => CONTAINER_HOSTS[0],
        }
    }
}

/// Returns the key of the service account that `GOOGLE_APPLICATION_CREDENTIALS` names.
///
/// # Errors
/// Returns `NotFound` if it names none, and the error of the file otherwise.
pub(super) fn google(variables: Variables<'_>) -> Result<Zeroizing<Vec<u8>>> {
    const VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
    let path = variables(VARIABLE).ok_or_else(|| missing(&[VARIABLE]))?;
    read(&named(absolute(&path, VARIABLE)?, "credentials", VARIABLE))
}

/// Returns the access key of the storage account.
///
/// # Errors
/// Returns `NotFound` if no variable has it, and `InvalidArgument` if it is too long.
pub(super) fn azure(variables: Variables<'_>) -> Result<Zeroizing<Vec<u8>>> {
    const NAMES: [&str; 2] = ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY"];
    let key = NAMES.into_iter().find_map(variables).ok_or_else(|| missing(&NAMES))?;
    if key.len() > MAX_BYTES {
        return Err(invalid(format!(
            "the key of the environment is longer than {MAX_BYTES} bytes"
        )));
    }
    Ok(Zeroizing::new(key.into_bytes()))
}

fn missing(names: &[&str]) -> Error {
    let names = names.join(" nor ");
    let neither = if names.contains(' ') { "neither " } else { "" };
    let verb = if names.contains(' ') { "is set" } else { "is not set" };
    let message = format!("the URI has no credentials_file=, and {neither}{names} {verb}");
    Error::new(ErrorKind::NotFound, message).with_repair(
        "add credentials_file=/PATH to the URI, or set the variable for the process that opens the volume: for a \
         mapping that is the daemon (systemctl edit cleat)",
    )
}

fn environment(variables: Variables<'_>, _region: &str) -> Result<Answer> {
    const ID: &str = "AWS_ACCESS_KEY_ID";
    const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
    let (id, secret) = match (variables(ID), variables(SECRET)) {
        (None, None) => return Ok(Answer::Nothing(format!("{ID} is not set"))),
        (Some(_), None) => return Err(half(ID, SECRET)),
        (None, Some(_)) => return Err(half(SECRET, ID)),
        (Some(id), Some(secret)) => (id, Zeroizing::new(secret)),
    };
    let token = variables("AWS_SESSION_TOKEN").map(Zeroizing::new);
    Ok(Answer::Keys(Keys { id, secret, token, origin: None }, Origin::Environment))
}

fn web_identity(variables: Variables<'_>, region: &str) -> Result<Answer> {
    const TOKEN: &str = "AWS_WEB_IDENTITY_TOKEN_FILE";
    const ROLE: &str = "AWS_ROLE_ARN";
    let Some(file) = variables(TOKEN) else {
        return Ok(Answer::Nothing(format!("{TOKEN} is not set")));
    };
    let role = variables(ROLE).ok_or_else(|| half(TOKEN, ROLE))?;
    let session = variables("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "cleat".to_owned());
    let endpoint = match variables("AWS_ENDPOINT_URL_STS") {
        Some(url) => address(&url, "AWS_ENDPOINT_URL_STS")?.url(),
        None => {
            let region = variables("AWS_REGION").unwrap_or_else(|| region.to_owned());
            if !is_label(&region) {
                return Err(invalid(format!("AWS_REGION cannot be {:?}", shown(&region))));
            }
            format!("https://sts.{region}.amazonaws.com")
        }
    };
    let token_file = absolute(&file, TOKEN)?;
    Ok(Answer::Service(Service::WebIdentity { token_file, role, session, endpoint }))
}

/// Reads the section of the profile in the shared credentials file. The default file need not exist, and need not have
/// the default profile.
fn shared_file(variables: Variables<'_>, _region: &str) -> Result<Answer> {
    const FILE: &str = "AWS_SHARED_CREDENTIALS_FILE";
    const PROFILE: &str = "AWS_PROFILE";
    let (given_file, given_profile) = (variables(FILE), variables(PROFILE));
    let is_default = given_file.is_none() && given_profile.is_none();
    let path = match (given_file, variables("HOME")) {
        (Some(file), _) => absolute(&file, FILE)?,
        (None, Some(home)) => absolute(&home, "HOME")?.join(".aws/credentials"),
        (None, None) => {
            let why = format!("neither {FILE} nor HOME is set");
            return if is_default { Ok(Answer::Nothing(why)) } else { Err(half(PROFILE, FILE)) };
        }
    };
    let at = path.display().to_string();
    let content = match read(&named(path, "credentials", FILE)) {
        Err(error) if is_default && error.kind() == ErrorKind::NotFound => {
            return Ok(Answer::Nothing(format!("{at} does not exist")));
        }
        other => other?,
    };
    let profile = given_profile.as_deref().unwrap_or("default");
    let section = format!("the section [{}] of {at}", shown(profile));
    match Keys::of_profile(&content, profile) {
        Ok(Some(keys)) => Ok(Answer::Keys(keys, Origin::SharedFile)),
        Ok(None) if is_default => Ok(Answer::Nothing(format!("{section} has no keys"))),
        Ok(None) => Err(invalid(format!("{section} has no keys")).with_repair(
            "write aws_access_key_id and aws_secret_access_key there; cleat does not use a profile with a role, \
             with SSO or with a credential_process",
        )),
        Err(why) => Err(invalid(format!("{section} is malformed: {why}"))),
    }
}

fn container(variables: Variables<'_>, _region: &str) -> Result<Answer> {
    const PATH: &str = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI";
    const URL: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    const TOKEN: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
    if let Some(path) = variables(PATH) {
        let is_path = path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_path {
            return Err(invalid(format!("{PATH} cannot be {:?}", shown(&path))));
        }
        return Ok(Answer::Service(Service::Task { path }));
    }
    let Some(url) = variables(URL) else {
        return Ok(Answer::Nothing(format!("neither {PATH} nor {URL} is set")));
    };
    let endpoint = address(&url, URL)?;
    let is_local = ["localhost", "127.0.0.1", "[::1]"].contains(&&*endpoint.host);
    if !endpoint.is_secure && !is_local && !CONTAINER_HOSTS.contains(&&*endpoint.host) {
        let message = format!("{URL} names {} without TLS", endpoint.shown());
        return Err(invalid(message).with_repair("use an address with https://"));
    }
    let token_file = absolute(&variables(TOKEN).ok_or_else(|| half(URL, TOKEN))?, TOKEN)?;
    Ok(Answer::Service(Service::Container { url: endpoint.url(), token_file }))
}

fn instance(variables: Variables<'_>, _region: &str) -> Result<Answer> {
    const DISABLED: &str = "AWS_EC2_METADATA_DISABLED";
    const ENDPOINT: &str = "AWS_EC2_METADATA_SERVICE_ENDPOINT";
    if variables(DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(Answer::Nothing(format!("{DISABLED} is true")));
    }
    let endpoint = match variables(ENDPOINT) {
        Some(url) => address(&url, ENDPOINT)?.url(),
        None => "http://169.254.169.254".to_owned(),
    };
    Ok(Answer::Service(Service::Instance { endpoint }))
}

/// The error of a source of which only one of two variables is set.
fn half(set: &str, missing: &str) -> Error {
    invalid(format!("{set} is set, but {missing} is not"))
        .with_repair(format!("set both in the environment of the process, or remove {set}"))
}

fn absolute(path: &str, variable: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    if path.is_absolute() {
        return Ok(path.to_owned());
    }
    Err(invalid(format!("{variable} has no absolute path: {:?}", shown(&path.to_string_lossy()))))
}

fn address(url: &str, variable: &str) -> Result<Endpoint> {
    Endpoint::parse(url).map_err(|_| {
        invalid(format!("{variable} has no address: {:?}", shown(url)))
            .with_repair("write it as https://HOST:PORT")
    })
}

fn named(path: PathBuf, what: &'static str, option: &'static str) -> CredentialFile {
    CredentialFile { path, what, option, max_bytes: MAX_BYTES, is_followed: false, source: None }
}

fn read(file: &CredentialFile) -> Result<Zeroizing<Vec<u8>>> {
    let (opened, _) = file.open_with_version()?;
    let content = file.read(&opened)?;
    Ok(Zeroizing::new(content.bytes().to_vec()))
}

//! The part of a Kubernetes API server that the driver uses, in this process: objects by path, over real HTTP.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub const VOLUMES: &str = "/apis/millpond.io/v1alpha1/millpondvolumes";
pub const PERSISTENT_VOLUMES: &str = "/api/v1/persistentvolumes";

#[derive(Default)]
pub struct State {
    /// By path, collection first.
    pub objects: BTreeMap<String, Value>,
    /// Method and path of every request.
    pub seen: Vec<String>,
    /// Answer everything with this code.
    pub fail: Option<u16>,
    /// The next continuation token has expired.
    pub expire: bool,
    /// Its CRD is that of an older release: what it does not know of a volume is left out.
    pub prunes: bool,
    /// Before the next DELETE another client writes the object.
    pub touch_before_delete: bool,
    /// Versions of objects given out.
    version: u64,
}

impl State {
    /// As the API server does with whatever is written.
    fn stamp(&mut self, mut object: Value) -> Value {
        self.version += 1;
        if self.prunes
            && let Some(spec) = object["spec"].as_object_mut()
        {
            spec.remove("deletion");
        }
        let metadata = &mut object["metadata"];
        metadata["resourceVersion"] = self.version.to_string().into();
        if metadata["uid"].is_null() {
            metadata["uid"] = format!("uid-{}", self.version).into();
        }
        object
    }
}

/// RFC 7396.
fn merge(object: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *object = patch.clone();
        return;
    };
    for (key, value) in patch {
        merge(&mut object[key], value);
    }
}

pub struct Api {
    pub address: String,
    state: Arc<Mutex<State>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Api {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state: Arc<Mutex<State>> = Arc::default();
        let serving = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, serving.clone()));
            }
        });
        Self { address, state, task }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn put(&self, path: &str, object: Value) {
        self.state().objects.insert(path.to_owned(), object);
    }

    /// A claim of class `class` with these annotations.
    pub fn claim(&self, namespace: &str, name: &str, class: &str, annotations: &[(&str, &str)]) {
        let annotations: BTreeMap<_, _> = annotations.iter().copied().collect();
        self.put(
            &format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"),
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {
                    "name": name, "namespace": namespace, "uid": format!("uid-{name}"), "annotations": annotations,
                },
                "spec": { "storageClassName": class },
            }),
        );
    }

    pub fn class(&self, name: &str, parameters: &[(&str, &str)]) {
        let parameters: BTreeMap<_, _> = parameters.iter().copied().collect();
        self.put(
            &format!("/apis/storage.k8s.io/v1/storageclasses/{name}"),
            json!({
                "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
                "provisioner": "csi.millpond.io", "parameters": parameters,
            }),
        );
    }

    /// A PersistentVolume of this driver's, as the provisioner makes it.
    pub fn persistent_volume(&self, name: &str, handle: &str) {
        self.put(
            &format!("{PERSISTENT_VOLUMES}/{name}"),
            json!({
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
                "spec": { "csi": { "driver": "csi.millpond.io", "volumeHandle": handle } },
            }),
        );
    }

    /// Events of this reason on objects of this kind.
    pub fn events(&self, kind: &str, reason: &str) -> Vec<Value> {
        let is = |e: &&Value| e["involvedObject"]["kind"] == kind && e["reason"] == reason;
        self.state().objects.values().filter(|o| o["kind"] == "Event").filter(is).cloned().collect()
    }
}

async fn answer(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end;
        }
        match stream.read_buf(&mut bytes).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
    let length = text.lines().find_map(|l| {
        let (name, value) = l.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
    });
    while bytes.len() < head + 4 + length.unwrap_or(0) {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    let mut words = text.split_whitespace();
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let body = serde_json::from_slice(&bytes[head + 4..]).unwrap_or(Value::Null);
    let (code, answer) = decide(&mut state.lock().unwrap(), method, target, body);
    let answer = answer.to_string();
    let head = format!(
        "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        answer.len()
    );
    let _ = stream.write_all(format!("{head}{answer}").as_bytes()).await; // the caller gave up
}

fn decide(state: &mut State, method: &str, target: &str, body: Value) -> (u16, Value) {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    state.seen.push(format!("{method} {path}"));
    if let Some(code) = state.fail {
        return status(code, "InternalError");
    }
    let parameter = |name: &str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_owned())
    };
    match method {
        "POST" => {
            let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
            if state.objects.contains_key(&path) {
                return status(409, "AlreadyExists");
            }
            let object = state.stamp(body);
            state.objects.insert(path, object.clone());
            (201, object)
        }
        "DELETE" => match state.objects.get(path).cloned() {
            Some(mut object) => {
                if std::mem::take(&mut state.touch_before_delete) {
                    object = state.stamp(object);
                    state.objects.insert(path.to_owned(), object.clone());
                }
                let wanted = body["preconditions"].as_object().cloned().unwrap_or_default();
                if wanted.iter().any(|(key, value)| object["metadata"][key] != *value) {
                    return status(409, "Conflict");
                }
                state.objects.remove(path);
                (200, json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200 }))
            }
            None => status(404, "NotFound"),
        },
        "PATCH" => match state.objects.get(path).cloned() {
            Some(mut object) => {
                merge(&mut object, &body);
                let object = state.stamp(object);
                state.objects.insert(path.to_owned(), object.clone());
                (200, object)
            }
            None => status(404, "NotFound"),
        },
        _ if path == VOLUMES || path == PERSISTENT_VOLUMES => {
            let limit = parameter("limit").map_or(usize::MAX, |l| l.parse().unwrap());
            let after = parameter("continue").unwrap_or_default();
            if !after.is_empty() && std::mem::take(&mut state.expire) {
                return status(410, "Expired");
            }
            let below = format!("{path}/");
            let items = state.objects.iter().filter_map(|(p, o)| Some((p.strip_prefix(&below)?, o)));
            let mut items: Vec<_> = items.filter(|(name, _)| *name > after.as_str()).collect();
            let more = items.len() > limit;
            items.truncate(limit);
            let token = items.last().filter(|_| more).map_or("", |(name, _)| *name);
            let list = items.iter().map(|(_, o)| (*o).clone()).collect::<Vec<_>>();
            let (kind, version) = match path {
                VOLUMES => ("MillpondVolumeList", "millpond.io/v1alpha1"),
                _ => ("PersistentVolumeList", "v1"),
            };
            let metadata = json!({ "continue": token });
            (200, json!({ "kind": kind, "apiVersion": version, "metadata": metadata, "items": list }))
        }
        _ => state.objects.get(path).map_or_else(|| status(404, "NotFound"), |o| (200, o.clone())),
    }
}

fn status(code: u16, reason: &str) -> (u16, Value) {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": format!("the fake says {reason}"), "details": { "name": "x" },
    });
    (code, status)
}

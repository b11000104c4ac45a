//! The Kubernetes objects that the checks make, as JSON.

use super::names::*;
use serde_json::{Value, json};
use testkit::s3::{ACCESS_KEY, SECRET_KEY};

pub fn namespace(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } })
}

pub fn secret(namespace: &str, name: &str, secret_key: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name, "namespace": namespace },
        "stringData": { "accessKeyId": ACCESS_KEY, "secretAccessKey": secret_key },
    })
}

/// The secret that the S3 server accepts.
pub fn good_secret(namespace: &str) -> Value {
    secret(namespace, S3_SECRET, SECRET_KEY)
}

/// `parameters` over a base that most classes of the suite have: the endpoint.
pub fn class(name: &str, endpoint: &str, parameters: &[(&str, &str)], mount_options: &[&str]) -> Value {
    let base = [("endpoint", endpoint), ("allowHttp", "true")];
    let mut class = plain_class(name, &[&base, parameters].concat());
    class["mountOptions"] = json!(mount_options);
    class
}

/// With these parameters alone; of two of one name the last counts.
pub fn plain_class(name: &str, parameters: &[(&str, &str)]) -> Value {
    let mut all = json!({});
    for (key, value) in parameters {
        all[*key] = json!(value);
    }
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
        "provisioner": DRIVER, "parameters": all, "reclaimPolicy": "Delete",
    })
}

/// Parameters that name the secret for publishing.
pub fn with_secret<'a>(name: &'a str, namespace: &'a str) -> [(&'a str, &'a str); 2] {
    [
        ("csi.storage.k8s.io/node-publish-secret-name", name),
        ("csi.storage.k8s.io/node-publish-secret-namespace", namespace),
    ]
}

pub fn claim(namespace: &str, name: &str, class: &str, mode: &str, annotations: &[(&str, &str)]) -> Value {
    let mut all = json!({});
    for (key, value) in annotations {
        all[*key] = json!(value);
    }
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "namespace": namespace, "annotations": all },
        "spec": {
            "accessModes": [mode], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    })
}

/// A pod with one container `main` and its volume at /data; the suite's tree descriptions are at /trees.
#[derive(Clone, Debug)]
pub struct Pod {
    namespace: String,
    name: String,
    spec: Value,
}

impl Pod {
    pub fn new(namespace: &str, name: &str, script: &str) -> Self {
        let mut pod = Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            spec: json!({
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 2,
                "automountServiceAccountToken": false, "enableServiceLinks": false,
                "securityContext": { "runAsUser": 10001, "runAsGroup": 10001, "runAsNonRoot": true },
                "volumes": [{ "name": "trees", "configMap": { "name": "trees" } }],
                "containers": [],
            }),
        };
        pod.add_container("main", script);
        pod
    }

    /// Reads until kubelet stops it, or for ever.
    pub fn sleeper(namespace: &str, name: &str) -> Self {
        // A shell that ends on SIGTERM although it is process 1.
        Self::new(namespace, name, "trap 'exit 0' TERM; while :; do sleep 0.2 & wait $!; done")
    }

    fn add_container(&mut self, name: &str, script: &str) {
        let container = json!({
            "name": name, "image": POD_IMAGE, "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/sh", "-c", script],
            "volumeMounts": [{ "name": "trees", "mountPath": "/trees" }],
            "securityContext": { "allowPrivilegeEscalation": false },
        });
        if let Some(containers) = self.spec["containers"].as_array_mut() {
            containers.push(container);
        }
    }

    /// One more container, with the mounts of the first.
    pub fn container(mut self, name: &str, script: &str) -> Self {
        self.add_container(name, script);
        let mounts = self.spec["containers"][0]["volumeMounts"].clone();
        if let Some(last) = self.spec["containers"].as_array_mut().and_then(|c| c.last_mut()) {
            last["volumeMounts"] = mounts;
        }
        self
    }

    /// A volume at /data.
    pub fn volume(mut self, mut source: Value) -> Self {
        source["name"] = json!("data");
        if let Some(volumes) = self.spec["volumes"].as_array_mut() {
            volumes.push(source);
        }
        self.mount(json!({ "name": "data", "mountPath": "/data" }))
    }

    pub fn claim(self, name: &str) -> Self {
        self.volume(json!({ "persistentVolumeClaim": { "claimName": name } }))
    }

    pub fn inline(self, attributes: Value, secret: Option<&str>) -> Self {
        let mut csi = json!({ "driver": DRIVER, "volumeAttributes": attributes });
        if let Some(secret) = secret {
            csi["nodePublishSecretRef"] = json!({ "name": secret });
        }
        self.volume(json!({ "csi": csi }))
    }

    pub fn mount(mut self, mount: Value) -> Self {
        if let Some(mounts) = self.spec["containers"][0]["volumeMounts"].as_array_mut() {
            mounts.push(mount);
        }
        self
    }

    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.spec[key] = value;
        self
    }

    /// A key of the first container.
    pub fn container_with(mut self, key: &str, value: Value) -> Self {
        self.spec["containers"][0][key] = value;
        self
    }

    pub fn object(&self) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": self.name, "namespace": self.namespace, "labels": { "app": self.name } },
            "spec": self.spec,
        })
    }

    /// A Job that runs this pod so often at once.
    pub fn job(&self, pods: u64) -> Value {
        json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": { "name": self.name, "namespace": self.namespace },
            "spec": {
                "parallelism": pods, "completions": pods, "backoffLimit": 0,
                "template": { "metadata": { "labels": { "app": self.name } }, "spec": self.spec },
            },
        })
    }

    pub fn deployment(&self, pods: u64) -> Value {
        let mut spec = self.spec.clone();
        spec["restartPolicy"] = json!("Always");
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": { "name": self.name, "namespace": self.namespace },
            "spec": {
                "replicas": pods, "selector": { "matchLabels": { "app": self.name } },
                "template": { "metadata": { "labels": { "app": self.name } }, "spec": spec },
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_container_sees_what_the_first_sees() {
        let pod = Pod::new("n", "p", "true").claim("c").container("other", "true").object();
        let containers = pod["spec"]["containers"].as_array().unwrap();
        assert_eq!(containers[0]["volumeMounts"], containers[1]["volumeMounts"]);
        assert_eq!(containers[1]["volumeMounts"][1]["mountPath"], "/data");
        assert_eq!(pod["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"], "c");
    }

    #[test]
    fn parameters_of_a_class_come_on_top_of_the_endpoint() {
        let class = class("c", "http://s", &[("source", "s3://b/p"), ("allowHttp", "false")], &["ro"]);
        assert_eq!(class["parameters"]["endpoint"], "http://s");
        assert_eq!(class["parameters"]["allowHttp"], "false");
        assert_eq!(class["mountOptions"][0], "ro");
    }
}
